"""Group runs that differ only in their seeds into arms, and name the arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.report.run import COPIED_SEED, Run
from rl.runtime.text import printable

_MAX_KEYS = 3  # maximum number of settings added to the overrides in an arm's label
_MOST_CHARACTERS = 40  # longer names are cut in the middle
_UNCLEAR = ("true", "false", "null", "none")  # an arm's name shows these values with their key
DEFAULTS = "(defaults)"  # label of an arm without overrides of its own


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm: runs with equal settings and different seeds."""

    label: str  # the arm's overrides, such as loss=cispo, without those that all arms share
    name: str  # the short form of `label`, such as cispo
    runs: tuple[Run, ...]
    choices: Mapping[str, str] = field(default_factory=dict)  # settings in `name`: key -> value

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def ended_early(self) -> list[Run]:
        """Return the runs that ended early, unless a finished run of the arm has the same seed."""
        seeds = {str(run.seed) for run in self.finished if run.seed is not None}
        return [run for run in self.runs if run.ended_early and str(run.seed) not in seeds]

    @property
    def num_looks(self) -> int:
        """Return how many looks (statistics.py) the arm had: one per command that added runs."""
        return len({run.grown for run in self.runs})


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    groups: list[list[Run]] = []
    for run in runs:
        group = next((g for g in groups if all(is_same_arm(one, run) for one in g)), [])
        groups += [] if group else [group]
        group.append(run)
    items = _distinguishing_overrides([group[0] for group in groups])
    full = [" ".join(of_arm) or DEFAULTS for of_arm in items]
    choices = _choices(items) if len(set(full)) == len(full) else [{}] * len(full)
    short = [name or label for name, label in zip(_names(choices), full, strict=True)]
    cut = _MOST_CHARACTERS // 2
    short = [one if len(one) <= 2 * cut else f"{one[:cut]}…{one[1 - cut :]}" for one in short]
    parts = zip(_make_unique(full), _make_unique(short), map(tuple, groups), choices, strict=True)
    return [Arm(*of_arm) for of_arm in parts]


def is_same_arm(one: Run, other: Run) -> bool:
    """Return whether two runs differ at most in the seed.

    If commits differ but overrides are equal, ignore settings that only one of the commits has.
    """
    if not one.config or not other.config:
        return one.overrides == other.overrides
    a, b = one.config, other.config
    shared, either = a.keys() & b.keys(), a.keys() | b.keys()
    if shared != either:
        if one.commit == other.commit or one.overrides != other.overrides:
            return False
        # Runs differ if `critic` is a value in one run and has keys like `critic.loss` in another.
        if {key[:end] for key in either for end in range(len(key)) if key[end] == "."} & either:
            return False
    return all(a[k] == b[k] or _value(one, k) == _value(other, k) for k in shared)


def _value(run: Run, key: str) -> Any:
    return run.seed if run.config[key] == COPIED_SEED else run.config[key]


def _distinguishing_overrides(firsts: Sequence[Run]) -> list[list[str]]:
    """Return each arm's overrides, except those that every arm has. `firsts`: a run per arm.

    If several arms have the same overrides, add settings that differ between them.
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


def _choices(items: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return {short key: value} per arm, or {} for all if their keys differ or a value is empty."""
    parts = [dict(item.split("=", 1) for item in of_arm if "=" in item) for of_arm in items]
    differ = any([*its] != [*parts[0]] or not all(its.values()) for its in parts)
    if differ or any(len(its) < len(of_arm) for its, of_arm in zip(parts, items, strict=True)):
        return [{}] * len(parts)
    ends = [key.rpartition(".")[2] for key in parts[0]] if parts else []
    if len(set(ends)) < len(ends):
        return parts
    return [dict(zip(ends, its.values(), strict=True)) for its in parts]


def _names(choices: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name per arm: the values, each with its key if the value alone would be unclear."""

    def is_clear(key: str) -> bool:
        return all(its[key][0].isalpha() and its[key] not in _UNCLEAR for its in choices)

    return [
        " ".join(value if is_clear(key) else f"{key}={value}" for key, value in its.items())
        for its in choices
    ]


def _make_unique(names: Sequence[str]) -> list[str]:
    return [
        f"{name} ({names[:index].count(name) + 1})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def differing_keys(runs: Sequence[Run]) -> list[str]:
    configs = [run.config for run in runs if run.config]
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
