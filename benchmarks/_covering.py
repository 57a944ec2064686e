"""Find all combinations of choices that a check refuses, and rows that cover all other pairs.

A conflict is a set of choices that the check refuses with one message, whatever else is chosen.
`Covering` finds a conflict when the check refuses a row: the groups of the conflict are those where
another choice makes the message disappear. A pair of choices is possible if some row without a
conflict contains it. A search over all rows decides that.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

Assignment = dict[str, str]  # group -> choice
Choice = tuple[str, str]  # (group, choice)
Pair = tuple[Choice, Choice]
Conflict = frozenset[Choice]
Problems = Callable[[Assignment], Sequence[str]]

_NUMBERS = re.compile(r"(?<![\w.])\d+(?![\w.])")
_VALUES = re.compile(r"(\w+\.[\w.]+)=[^\s:,)]+")
_EXTRA_ROWS = 200  # rows checked at the end, to find conflicts of three that no pair has shown


def form_of(problem: str, row: Assignment) -> str:
    """Return the message without the chosen names: equal for all conflicts of one kind."""
    for group, choice in row.items():
        problem = re.sub(rf"(?<![\w.]){group}={re.escape(choice)}(?!\.?\w)", f"{group}=?", problem)
    return _NUMBERS.sub("?", _VALUES.sub(r"\1=?", problem))


@dataclass
class Covering:
    """Hold the answers of a check for every pair of choices.

    Attributes:
        conflicts: refused sets of choices with their message; may start with known ones.
        rows: assignments without a problem; together they contain every possible pair.
        impossible: pairs without a conflict that no row without a conflict contains.

    """

    groups: Mapping[str, Sequence[str]]
    problems: Problems
    conflicts: dict[Conflict, str] = field(default_factory=dict)
    rows: list[Assignment] = field(default_factory=list)
    impossible: set[Pair] = field(default_factory=set)

    def pairs(self) -> list[Pair]:
        """Return all pairs of choices from two groups, in alphabetical order."""
        return [
            ((a, x), (b, y))
            for a, b in combinations(sorted(self.groups), 2)
            for x in self.groups[a]
            for y in self.groups[b]
        ]

    def refused(self) -> list[Pair]:
        """Return the pairs that contain a conflict."""
        return [pair for pair in self.pairs() if self._is_refused(dict(pair))]

    def fill(self, seed: int = 0) -> "Covering":
        """Find conflicts and rows; the same seed finds the same rows."""
        rng = random.Random(seed)
        uncovered = set(self.pairs())
        for pair in self.pairs():
            while pair in uncovered:
                refused = self._is_refused(dict(pair))
                row = None if refused else self._completed(dict(pair), uncovered, rng)
                if row is None:
                    uncovered.discard(pair)
                    self.impossible |= set() if refused else {pair}
                elif not self._learn(row):
                    self.rows.append(row)
                    uncovered -= set(combinations(sorted(row.items()), 2))
        for _ in range(_EXTRA_ROWS):
            row = self._completed({}, set(), rng)
            assert row is not None
            self._learn(row)
        return self

    def _learn(self, row: Assignment) -> bool:
        """Ask the check about a row, store its conflicts, and return True if there are any."""
        problems = self.problems(row)
        for form in {form_of(problem, row) for problem in problems}:
            matters = [
                group
                for group in self.groups
                if any(not self._says(form, {**row, group: c}) for c in self.groups[group])
            ]
            for choices in product(*(self.groups[group] for group in matters)):
                other = {**row, **dict(zip(matters, choices, strict=True))}
                if message := self._says(form, other):
                    conflict = frozenset((group, other[group]) for group in matters)
                    self.conflicts.setdefault(conflict, message)
        return bool(problems)

    def _says(self, form: str, row: Assignment) -> str:
        """Return the message of this form that the check has for a row, or an empty string."""
        return next((p for p in self.problems(row) if form_of(p, row) == form), "")

    def _is_refused(self, row: Assignment) -> bool:
        """Return whether a partial row contains a conflict."""
        held = set(row.items())
        return any(conflict <= held for conflict in self.conflicts)

    def _completed(
        self, row: Assignment, uncovered: set[Pair], rng: random.Random
    ) -> Assignment | None:
        """Complete the row with many uncovered pairs; return None if no row is possible."""
        free = [group for group in self.groups if group not in row]
        if not free:
            return row
        held = set(row.items())

        def gain(choice: str) -> int:
            pairs = ((min(h, (group, choice)), max(h, (group, choice))) for h in held)
            return sum(pair in uncovered for pair in pairs)

        rests = [conflict - held for conflict in self.conflicts]
        closed = set().union(*(rest for rest in rests if len(rest) == 1))  # would be refused
        left = {g: [c for c in self.groups[g] if (g, c) not in closed] for g in free}
        # Take the group with the fewest choices first, so that a dead end shows early.
        fewest = min(map(len, left.values()))
        group = rng.choice([name for name in free if len(left[name]) == fewest])
        for choice in sorted(rng.sample(left[group], fewest), key=gain, reverse=True):
            whole = self._completed({**row, group: choice}, uncovered, rng)
            if whole is not None:
                return whole
        return None


Merged = tuple[dict[str, list[str]], str]  # group -> choices, and their message


def merged(conflicts: Mapping[Conflict, str]) -> list[Merged]:
    """Merge conflicts of one kind: a list of choices for each group, and one message."""
    kinds: dict[tuple[str, ...], list[Merged]] = {}
    for conflict, message in sorted(conflicts.items(), key=lambda item: sorted(item[0])):
        row = dict(sorted(conflict))
        alone = {group: [choice] for group, choice in row.items()}
        kinds.setdefault((form_of(message, row), *row), []).append((alone, message))
    table = []
    for (_, *groups), members in kinds.items():
        for group in groups:
            together: dict[str, Merged] = {}  # members that differ in this group alone
            for choices, message in members:
                first = ({**choices, group: []}, message)
                together.setdefault(str(first[0]), first)[0][group].extend(choices[group])
            members = list(together.values())
        table += members
    return table
