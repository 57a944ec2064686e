"""Group runs that differ only in their seeds into arms, and name the arms."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lab.report.run import Run

_MAX_KEYS = 3  # maximum number of settings in an arm's name
AS_COMPOSED = "(as composed)"  # label of an arm without overrides


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm: runs with equal settings and different seeds."""

    label: str  # the arm's overrides, such as loss=cispo
    name: str  # a short unique label, such as cispo
    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        """The finished runs, which enter the comparison."""
        return [run for run in self.runs if run.finished]


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Group the runs into arms, in the order in which the arms first appear."""
    groups: list[list[Run]] = []
    for run in runs:
        group = next((g for g in groups if all(is_same_arm(one, run) for one in g)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    full = labels([group[0] for group in groups])
    return [
        Arm(label, name, tuple(group))
        for label, name, group in zip(full, short_labels(full), groups, strict=True)
    ]


def is_same_arm(one: Run, other: Run) -> bool:
    """Return True if two runs differ only in the seed, as far as their records show.

    Settings that exist at only one of two commits are ignored if the overrides of both runs are
    equal.
    """
    if not one.config or not other.config:
        return one.overrides == other.overrides
    if one.commit == other.commit or one.overrides != other.overrides:
        return one.config == other.config
    shared = one.config.keys() & other.config.keys()
    either = one.config.keys() | other.config.keys()
    # Runs differ if `critic` is a value in one run and has keys like `critic.lam` in the other.
    groups = {key[:end] for key in either for end in range(len(key)) if key[end] == "."}
    return not groups & either and all(one.config[key] == other.config[key] for key in shared)


def code_note(arm: Arm) -> str:
    """Return a warning if the finished runs of the arm used different code, "" otherwise."""
    versions: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for run in arm.finished:
        for name, hashes in run.code.items():
            versions[name].add(hashes)
    files = [name for name, used in versions.items() if len(used) > 1 or len(min(used)) > 1]
    if not files:
        return ""
    return (
        f"The runs of {arm.name} used different versions of {', '.join(sorted(files))}: compare "
        "the copies in code/ of their folders."
    )


def labels(firsts: Sequence[Run]) -> list[str]:
    """Return a unique label for each arm, given the first run of each arm.

    A label lists the overrides that not all arms have. Arms with equal overrides are distinguished
    by the settings that differ.
    """
    common = set.intersection(*(set(run.overrides) for run in firsts)) if firsts else set()
    names = [" ".join(item for item in run.overrides if item not in common) for run in firsts]
    texts = []
    for name, run in zip(names, firsts, strict=True):
        alike = [other for other, its in zip(firsts, names, strict=True) if its == name]
        keys = differing_keys(alike)[:_MAX_KEYS]  # empty if no other arm has this name
        values = [f"{key}={run.config.get(key)}" for key in keys]
        texts.append(" ".join([name, *values]).strip() or AS_COMPOSED)
    return [
        f"{text} ({texts[:index].count(text) + 1})" if texts.count(text) > 1 else text
        for index, text in enumerate(texts)
    ]


def short_labels(full: Sequence[str]) -> list[str]:
    """Return the labels without their key if all keys are equal: cispo for loss=cispo."""
    parts = [label.partition("=") for label in full]
    if len({key for key, _, _ in parts}) > 1 or not all(value for _, _, value in parts):
        return list(full)
    if any(" " in label for label in full):
        return list(full)
    # Keep the end of the key if a value is a number: lr=1e-6 for optimizer.lr=1e-6.
    plain = all(value[0].isalpha() for _, _, value in parts)
    return [value if plain else f"{key.rpartition('.')[2]}={value}" for key, _, value in parts]


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys of the settings in which the runs differ, in alphabetical order."""
    configs = [run.config for run in runs if run.config]
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
