"""Arms: runs that differ in nothing but the seed, and what each is called."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.report.evidence import Evidence, is_same_arm

_MOST_KEYS = 3  # that an arm is called by
AS_COMPOSED = "(as composed)"  # an arm that overrides nothing which the others do not


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs over seeds."""

    label: str  # loss=cispo: what was overridden
    name: str  # cispo: the same as short as the other arms allow
    runs: tuple[Evidence, ...]

    @property
    def finished(self) -> list[Evidence]:
        """The runs that count."""
        return [run for run in self.runs if run.finished]


def arms_of(runs: Sequence[Evidence]) -> list[Arm]:
    """The runs by arm, in the order in which the arms first appear."""
    members: dict[int, list[Evidence]] = {}
    # Runs that left a config go first: one without can only be told by its overrides.
    for run in sorted(runs, key=lambda run: run.config is None):
        homes = (i for i, its in members.items() if all(is_same_arm(one, run) for one in its))
        home = next(homes, len(members))
        members.setdefault(home, []).append(run)
    place = {id(run): index for index, run in enumerate(runs)}
    groups = [sorted(group, key=lambda run: place[id(run)]) for group in members.values()]
    groups.sort(key=lambda group: place[id(group[0])])
    full = labels(groups)
    return [
        Arm(label, name, tuple(group))
        for label, name, group in zip(full, short(full), groups, strict=True)
    ]


def labels(groups: Sequence[Sequence[Evidence]]) -> list[str]:
    """What tells each arm from the others: its overrides, else the settings that differ."""
    firsts = [group[0] for group in groups]
    common = set.intersection(*(set(run.overrides) for run in firsts)) if firsts else set()
    names = [" ".join(item for item in run.overrides if item not in common) for run in firsts]
    texts = []
    for name, run in zip(names, firsts, strict=True):
        alike = [other for other, its in zip(firsts, names, strict=True) if its == name]
        keys = differing_keys(alike)[:_MOST_KEYS]  # none where the name is one arm's own
        values = [f"{key}={(run.config or {}).get(key)}" for key in keys]
        texts.append(" ".join([name, *values]).strip() or AS_COMPOSED)
    # Charts know an arm by its name alone.
    return [
        f"{text} ({texts[:index].count(text) + 1})" if texts.count(text) > 1 else text
        for index, text in enumerate(texts)
    ]


def short(full: Sequence[str]) -> list[str]:
    """The labels without the key where all have the same one: cispo instead of loss=cispo."""
    parts = [label.partition("=") for label in full]
    if len({key for key, _, _ in parts}) > 1 or not all(value for _, _, value in parts):
        return list(full)
    if any(" " in label for label in full):
        return list(full)
    # A number alone says nothing: of 0.1 nobody knows what it is.
    plain = all(value[0].isalpha() for _, _, value in parts)
    return [value if plain else f"{key.rpartition('.')[2]}={value}" for key, _, value in parts]


def differing_keys(runs: Sequence[Evidence]) -> list[str]:
    """Settings in which the runs differ, in alphabetical order."""
    configs = [run.config for run in runs if run.config is not None]
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
