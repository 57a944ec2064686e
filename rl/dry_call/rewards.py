"""Dry calls of components that turn rewards into weights, such as the advantage.

This module imports no torch. A made-up turn of length n has n completion tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.episode import Example, StopReason
from rl.dry_call.report import BadResult, Report
from rl.records import Credit, Rollout, TrainingRow
from rl.rollouts.credit import GroupCredit


def made_up_rollout(
    reward: float | None, *turns: int, cut_off: bool = False, turn_limit: int | None = None
) -> Rollout:
    """Return a rollout with one prompt token and turns of these numbers of completion tokens."""
    numbers = np.repeat(np.arange(len(turns), dtype=np.int32), turns)
    completion = np.ones(len(numbers), np.int32)
    row = TrainingRow(
        token_ids=np.concatenate([[0], completion]).astype(np.int32),
        completion_mask=np.concatenate([[False], completion > 0]),
        rollout_logprobs=np.concatenate([[0.0], -completion]).astype(np.float32),
        token_versions=np.concatenate([[-1], 0 * completion]).astype(np.int32),
        turns=np.concatenate([[-1], numbers]).astype(np.int32),
    )
    return Rollout(
        rows=(row,) if len(numbers) else (),
        messages=[{"role": "user", "content": "made up"}],
        reward=reward,
        rewards={} if reward is None else {"reward": reward},
        stop_reason=StopReason.MAX_TOKENS if cut_off else StopReason.STOP,
        turns=len(turns),
        generation_time=0.0,
        turn_limit=turn_limit,
    )


def check_advantage(report: Report, advantage: Any, group_size: int) -> dict[str, bool]:
    """Call an advantage on made-up groups; return the facts named advantage_* in Learned."""
    # The first reward is not 0, so that a group of one shows whether a baseline is subtracted.
    ordinary: list[float | None] = [(1.0, 0.0, 0.5)[i % 3] for i in range(group_size)]
    cases: dict[str, list[float | None]] = {
        f"the rewards {ordinary[:3]} of a group": ordinary,
        "equal rewards": [1.0] * group_size,
        "all rewards but one None (not scored)": [1.0, *[None] * (group_size - 1)],
        "None for each reward (none was scored)": [None] * group_size,
    }
    by_turn = False

    def shaped(rewards: Sequence[float | None]) -> list[Any]:
        """Return one reward per rollout; if by_turn, one to three turn rewards per rollout."""
        if not by_turn:
            return list(rewards)
        return [None if r is None else [r / 2] * (i % 3 + 1) for i, r in enumerate(rewards)]

    def succeeds(report: Report, what: str) -> bool:
        """Return whether the advantage returned valid numbers for the case named `what`."""
        given = shaped(cases[what])
        return _called(report, "advantage", advantage, what, by_turn, given) is not None

    first = next(iter(cases))
    if not succeeds(Report(), first):
        by_turn = True
        by_turn = succeeds(Report(), first)
    if not all(succeeds(report, what) for what in cases):
        return {}
    try:
        advantage(shaped([-1.0, -0.25, *[0.5] * (group_size - 2)][: max(group_size, 1)]))
        refuses_negative = False
    except Exception:  # noqa: BLE001 whatever it raises, it does not take such a reward
        refuses_negative = True
    return {
        "advantage_takes_turns": by_turn,
        "advantage_is_reward": [*advantage(shaped(ordinary))] == shaped(ordinary),
        "advantage_compares": all(_is_zero(advantage, shaped([r])) for r in (1.0, 0.0, 0.37)),
        "advantage_refuses_negative": refuses_negative,
    }


def _is_zero(advantage: Any, alone: list[Any]) -> bool:
    """Return whether the only rollout of a group has the advantage 0."""
    try:
        return not np.any(advantage(alone)[0])
    except Exception:  # noqa: BLE001 an advantage may need a larger group
        return False


def check_aggregation(report: Report, aggregation: Any) -> dict[str, bool]:
    """Return whether an aggregation accepts turns, and whether all rollouts weigh the same."""
    lengths, groups = [5, 3, 0, 8], [0, 0, 1, 1]
    forms: list[list[Any]] = [lengths, [[2, 3], [3], [], [4, 4]]]
    trials = [Report(), Report()]
    for by_turn, (given, trial) in enumerate(zip(forms, trials, strict=True)):
        what = f"the lengths {given}"
        weights = _called(trial, "aggregation", aggregation, what, bool(by_turn), given, groups)
        if weights is not None:
            totals = [] if by_turn else [w * n for w, n in zip(weights, lengths, strict=True) if n]
            return {
                "aggregation_takes_turns": bool(by_turn),
                "aggregation_weighs_sequences": bool(totals) and max(totals) - min(totals) < 1e-9,
            }
    report.problems += trials[0].problems
    return {}


def _called(
    report: Report, group: str, made: Any, what: str, by_turn: bool, given: list[Any], *more: Any
) -> Any:
    """Call a component; return its result, or None if the result is not one number per rollout."""
    with report.calling(group, made, what):
        result = made(given, *more)
        _require_numbers(result, given, by_turn)
        return result
    return None


def _require_numbers(result: Any, given: list[Any], by_turn: bool, unit: str = "rollout") -> None:
    """Raise BadResult unless `result` has a number per item of `given` (per turn: by_turn)."""
    is_list = isinstance(result, Sequence | np.ndarray)
    if not is_list or len(result) != len(given):
        what = f"{len(result)} numbers" if is_list else f"a {type(result).__name__}"
        raise BadResult(f"returned {what} for a group of {len(given)}: return one for each {unit}")
    for number, item in zip(result, given, strict=True):
        if by_turn:
            if item is not None:
                _require_numbers(number, item, False, "turn of a rollout")
        elif not isinstance(number, int | float | np.number) or not math.isfinite(number):
            raise BadResult(
                f"returned {number!r} instead of a number: return a finite number for each "
                f"{unit}, 0 where there is nothing to learn"
            )


def check_truncation(
    report: Report, truncation: Any, shaping: Any, longest: int
) -> dict[str, bool]:
    """Return whether a truncation makes rewards negative; also dry-call the reward shaping."""
    rollouts = [
        *(made_up_rollout(reward, 2, 3) for reward in (0.0, 1.0, None)),
        *(made_up_rollout(reward, longest, cut_off=True) for reward in (0.0, 1.0, None)),
        made_up_rollout(1.0, longest, cut_off=True, turn_limit=longest),
        made_up_rollout(0.0, longest, cut_off=True, turn_limit=longest),
        made_up_rollout(0.5),  # a rollout without tokens
    ]
    pairs: list[tuple[Rollout, Credit]] = []
    # Ignore KeyError, because a made-up rollout lacks the named rewards of the environment.
    with report.calling("truncation", truncation, "a made-up rollout", unknown=KeyError):
        for rollout in rollouts:
            credit = truncation(rollout)
            if not isinstance(credit, Credit):
                raise BadResult(
                    f"returned a {type(credit).__name__}: return Credit(reward, trains=...) of "
                    "rl/records.py"
                )
            pairs.append((rollout, credit))
    if len(pairs) < len(rollouts):
        pairs.clear()
    example = Example(0, "made up", [{"role": "user", "content": "made up"}])
    with report.calling("reward", shaping, "a made-up group"):
        crediting = GroupCredit(
            truncation, shaping, lambda rewards: [0.0] * len(rewards), lambda _: {"reward": 1.0}
        )
        crediting(example, rollouts)
    rewards = [c.reward for r, c in pairs if r.reward is not None and c.reward is not None]
    return {"truncation_lowers_rewards": any(after < 0 for after in rewards)}
