"""Find the rollouts that an advantage compared with each other, and the compared numbers."""

from collections.abc import Sequence

from rl.records import Credit, Group, Rollout


def roles_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the roles of a group. An advantage compares only rollouts of the same role."""
    return list(dict.fromkeys(rollout.role for rollout in rollouts)) or [""]


def compared_ids(groups: Sequence[Group]) -> list[int]:
    """Return a number for each rollout: equal numbers mean the same group and role."""
    keys = [(i, rollout.role) for i, group in enumerate(groups) for rollout in group.rollouts]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def compared_columns(group: Group) -> list[list[float]] | None:
    """Return the numbers that the advantage compared: for each role, one list per reward or turn.

    A list has a number for each rollout of the role, except rollouts without a reward or without
    this turn. Return None if the advantage does not compare rollouts.
    """
    pairs = list(zip(group.rollouts, group.credits, strict=False))
    found = [_columns([c for r, c in pairs if r.role == role]) for role in roles_of(group.rollouts)]
    scored = [columns for columns in found if columns != [[]]] or found  # skip unscored roles
    if all(columns is None for columns in scored):
        return None
    return [column for columns in scored for column in columns or []]


def spread(column: Sequence[float]) -> float:
    return max(column) - min(column) if column else 0.0


def _columns(credits: Sequence[Credit]) -> list[list[float]] | None:
    credits = [credit for credit in credits if credit.reward is not None]
    by_turn = any(len(credit.advantages) > 1 for credit in credits)
    rows = [
        c.compared if c.compared is not None else c.advantages if by_turn else (c.reward or 0.0,)
        for c in credits
    ]
    if rows and not any(rows):
        return None
    num_columns = max(map(len, rows), default=1)
    return [[row[i] for row in rows if i < len(row)] for i in range(num_columns)]
