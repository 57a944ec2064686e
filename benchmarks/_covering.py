"""Sets of runs that hold every pair of choices of any two groups, but those that a rule refuses."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Assignment = dict[str, str]  # group -> choice
Pair = tuple[tuple[str, str], tuple[str, str]]  # two (group, choice)
Problems = Callable[[Assignment], Sequence[str]]

_REPAIRS, _TRIES, _CANDIDATES = 25, 4, 12


@dataclass
class Covering:
    """What was found.

    Attributes:
        rows: assignments without a problem; together they hold every pair that is possible.
        refused: pairs that are in no such assignment, and the sentence that says why.

    """

    rows: list[Assignment] = field(default_factory=list)
    refused: dict[Pair, str] = field(default_factory=dict)


def pairs_of(row: Assignment) -> set[Pair]:
    """Every two choices of a row, groups in alphabetical order."""
    return set(combinations(sorted(row.items()), 2))


def cover(groups: Mapping[str, Sequence[str]], problems: Problems, seed: int = 0) -> Covering:
    """Return a covering set of rows: greedy, by random completion and repair.

    Args:
        groups: choices of each group.
        problems: what is wrong with a row; nothing for one that can run.
        seed: the same one gives the same rows.

    """
    rng = random.Random(seed)
    found = Covering()
    todo = [
        ((a, x), (b, y))
        for a, b in combinations(sorted(groups), 2)
        for x in groups[a]
        for y in groups[b]
    ]
    uncovered = set(todo)
    for pair in todo:
        if pair not in uncovered:
            continue
        made = [_complete(groups, problems, dict(pair), rng) for _ in range(_TRIES)]
        rows = [row for row, wrong in made if not wrong]
        if not rows:
            _, wrong = min(made, key=lambda one: len(one[1]))
            found.refused[pair] = wrong[0]
            uncovered.discard(pair)
            continue
        rows += [_improve(groups, problems, row, dict(pair), uncovered, rng) for row in rows]
        best = max(rows, key=lambda row: len(pairs_of(row) & uncovered))
        found.rows.append(best)
        uncovered -= pairs_of(best)
    return found


def _complete(
    groups: Mapping[str, Sequence[str]], problems: Problems, fixed: Assignment, rng: random.Random
) -> tuple[Assignment, Sequence[str]]:
    """A row with the fixed choices, repaired group by group, and what is still wrong with it."""
    row = {group: fixed.get(group) or rng.choice(list(c)) for group, c in groups.items()}
    wrong = problems(row)
    free = [group for group in groups if group not in fixed]
    for _ in range(_REPAIRS):
        if not wrong:
            break
        group = rng.choice(free)
        others = [{**row, group: choice} for choice in groups[group]]
        rng.shuffle(others)
        row, wrong = min(((other, problems(other)) for other in others), key=lambda o: len(o[1]))
    return row, wrong


def _improve(
    groups: Mapping[str, Sequence[str]],
    problems: Problems,
    row: Assignment,
    fixed: Assignment,
    uncovered: set[Pair],
    rng: random.Random,
) -> Assignment:
    """The row with single choices changed while that covers more."""
    free = [group for group in groups if group not in fixed]
    for group in rng.sample(free, min(_CANDIDATES, len(free))):
        others = [{**row, group: choice} for choice in groups[group]]
        allowed = [other for other in others if not problems(other)]
        row = max([row, *allowed], key=lambda one: len(pairs_of(one) & uncovered))
    return row
