"""Group runs that differ only in their seeds into arms, and name the arms."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.report.run import Run
from rl.runtime.text import printable

_MAX_KEYS = 3  # maximum number of settings in an arm's name
_MOST_CHARACTERS = 40  # longer names are cut in the middle
_BARE = ("true", "false", "null", "none")  # values that say little without their key
DEFAULTS = "(defaults)"  # label of an arm without overrides


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm: runs with equal settings and different seeds."""

    label: str  # the arm's overrides, such as loss=cispo
    name: str  # a short unique label, such as cispo
    runs: tuple[Run, ...]
    choices: tuple[tuple[str, str], ...] = ()  # the key and the value of each part of the name

    @property
    def finished(self) -> list[Run]:
        """The finished runs, which enter the comparison."""
        return [run for run in self.runs if run.finished]

    @property
    def ended_early(self) -> list[Run]:
        """The runs that began and did not finish, except seeds of which another run finished."""
        seeds = {run.seed for run in self.finished} - {None}
        return [run for run in self.runs if run.ended_early and run.seed not in seeds]

    @property
    def num_looks(self) -> int:
        """How often the number of runs was chosen: 1, plus 1 each time the sweep grew."""
        return len({run.grown for run in self.runs})


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Group the runs into arms, in the order in which the arms first appear."""
    groups: list[list[Run]] = []
    for run in runs:
        group = next((g for g in groups if all(is_same_arm(one, run) for one in g)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    firsts = [group[0] for group in groups]
    items = _distinguishing(firsts)
    full = [" ".join(of_arm) or DEFAULTS for of_arm in items]
    choices = _choices(items) if len(set(full)) == len(full) else [()] * len(full)
    names = _unique(
        [_cut(name or label) for name, label in zip(_names(choices), full, strict=True)]
    )
    return [
        Arm(label, name, tuple(group), choice)
        for label, name, group, choice in zip(_unique(full), names, groups, choices, strict=True)
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


def _distinguishing(firsts: Sequence[Run]) -> list[list[str]]:
    """Return the overrides that not all arms have, given the first run of each arm.

    Arms with equal overrides are distinguished by the settings that differ.
    """
    common = set.intersection(*(set(run.overrides) for run in firsts)) if firsts else set()
    items = [[printable(item) for item in run.overrides if item not in common] for run in firsts]
    for its in items[:]:
        alike = [index for index, other in enumerate(items) if other == its]
        keys = differing_keys([firsts[index] for index in alike])[:_MAX_KEYS]
        for index in alike if len(alike) > 1 else ():
            values = [printable(f"{key}={firsts[index].config.get(key)}") for key in keys]
            items[index] = [*its, *values]
    return items


def _choices(items: Sequence[Sequence[str]]) -> list[tuple[tuple[str, str], ...]]:
    """Return the last word of each key with its value, or nothing if the arms' keys differ."""
    parts = [[item.partition("=") for item in of_arm] for of_arm in items]
    keys = [[key for key, _, value in of_arm if value] for of_arm in parts]
    if any(its != keys[0] or len(its) < len(arm) for its, arm in zip(keys, parts, strict=True)):
        return [()] * len(parts)
    ends = [key.rpartition(".")[2] for key in keys[0]] if keys else []
    heads = ends if len(set(ends)) == len(ends) else keys[0]
    return [
        tuple((head, value) for head, (_, _, value) in zip(heads, of_arm, strict=True))
        for of_arm in parts
    ]


def _names(choices: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """Return the values of each arm, with their keys where a value says little alone."""
    columns = zip(*choices, strict=True)
    clear = [all(v[0].isalpha() and v not in _BARE for _, v in column) for column in columns]
    return [
        " ".join(
            value if is_clear else f"{key}={value}"
            for is_clear, (key, value) in zip(clear, of_arm, strict=True)
        )
        for of_arm in choices
    ]


def _cut(name: str) -> str:
    """Return the name without its middle if it is long."""
    if len(name) <= _MOST_CHARACTERS:
        return name
    half = _MOST_CHARACTERS // 2
    return f"{name[:half]}…{name[1 - half :]}"


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number after each name that occurs several times."""
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys of the settings in which the runs differ, in alphabetical order."""
    configs = [run.config for run in runs if run.config]
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
