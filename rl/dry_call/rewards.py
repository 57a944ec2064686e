"""Call truncation, reward shaping, advantage, batch credit and aggregation on made-up values."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.episode import Example, StopReason
from losses.groups import ScoredGroup
from rl.dry_call.report import BadResult, Report, json_round_trip
from rl.records import Credit, Group, Rollout, TrainingRow, columns_of
from rl.rollouts.batch_credit import apply_batch_credit
from rl.rollouts.credit import RewardShaping, scored_group
from rl.runtime.failure import RunFailed

_EXAMPLE = Example(0, "made up", [{"role": "user", "content": "made up"}])


class _MadeUpRewards(dict[str, Any]):
    """Named rewards in which every name that an environment may use has the same value."""

    def __missing__(self, name: str) -> Any:
        if not self:
            raise KeyError(name)
        return self["reward"]


def made_up_rollout(
    reward: float | None, *turns: int, cut_off: bool = False, turn_limit: int | None = None
) -> Rollout:
    """Return a rollout with one prompt token. `turns`: numbers of completion tokens by turn."""
    numbers = np.repeat(np.arange(len(turns), dtype=np.int32), turns)
    completion = np.ones(len(numbers), np.int32)
    columns = columns_of(TrainingRow).items()
    values: dict[str, Any] = {name: np.full(1 + len(numbers), c.fill) for name, c in columns}
    values |= {
        "token_ids": [0, *completion],
        "completion_mask": [False, *(completion > 0)],
        "rollout_logprobs": [0.0, *-completion],
        "token_versions": [-1, *0 * completion],
        "turns": [-1, *numbers],
    }
    row = TrainingRow(**{name: np.asarray(values[name], c.dtype) for name, c in columns})
    return Rollout(
        rows=(row,) if len(numbers) else (),
        messages=[{"role": "user", "content": "made up"}],
        reward=reward,
        rewards=_MadeUpRewards() if reward is None else _MadeUpRewards(reward=reward),
        stop_reason=StopReason.MAX_TOKENS if cut_off else StopReason.STOP,
        turns=len(turns),
        generation_time=0.0,
        turn_limit=turn_limit,
        turn_rewards=_MadeUpRewards(reward=(0.0,) * len(turns)),
    )


def check_advantage(
    report: Report, advantage: Any, group_size: int, example: Example = _EXAMPLE
) -> dict[str, bool]:
    """Call an advantage on made-up groups. Return the facts advantage_* (rl/config/learned.py)."""

    def new_group(rewards: Sequence[float | None]) -> ScoredGroup:
        turns = [(2, 3, 4)[: i % 3 + 1] for i in range(len(rewards))]
        rollouts = [made_up_rollout(r, *t) for r, t in zip(rewards, turns, strict=True)]
        return scored_group(example, rollouts, [Credit(r) for r in rewards], {"reward": 1.0})

    # Begin with 1.0. With group_size=1, a reward 0 would equal its advantage by accident.
    ordinary: list[float | None] = [(1.0, 0.0, 0.5)[i % 3] for i in range(group_size)]
    cases: dict[str, list[float | None]] = {
        f"the rewards {ordinary[:3]} of a group": ordinary,
        "equal rewards": [1.0] * group_size,
        "all rewards but one None (not scored)": [1.0, *[None] * (group_size - 1)],
        "None for each reward (none was scored)": [None] * group_size,
    }

    def succeeds(report: Report, what: str, unit: str) -> bool:
        with report.calling("advantage", advantage, what):
            group = new_group(cases[what])
            part = "" if unit == "rollout" else unit
            _require_numbers(advantage(group), _rewards_per_unit(group, unit), part)
            return True
        return False

    first = next(iter(cases))
    accepted = (unit for unit in ("rollout", "turn", "token") if succeeds(Report(), first, unit))
    gives_lists = False
    with Report().calling("advantage", advantage):
        gives_lists = np.ndim(advantage(new_group(ordinary))[0]) > 0
    unit = next(accepted, "turn" if gives_lists else "rollout")
    if not all(succeeds(report, what, unit) for what in cases):
        return {}
    with report.calling("advantage", advantage):
        if hasattr(advantage, "state") or hasattr(advantage, "load"):
            advantage.load(json_round_trip(advantage.state()))
    try:
        advantage(new_group([-1.0, -0.25, *[0.5] * (group_size - 2)][: max(group_size, 1)]))
        refuses_negative = False
    except Exception:  # noqa: BLE001 any error means that the advantage refuses negative rewards
        refuses_negative = True
    group = new_group(ordinary)
    return {
        "advantage_by_turn": unit == "turn",
        "advantage_by_token": unit == "token",
        "advantage_is_reward": [*advantage(group)] == _rewards_per_unit(group, unit),
        "advantage_compares": all(_gives_zero(advantage, new_group([r])) for r in (1.0, 0.0, 0.37)),
        "advantage_refuses_negative": refuses_negative,
    }


def _rewards_per_unit(group: ScoredGroup, unit: str) -> list[Any]:
    if unit == "rollout":
        return list(group.rewards)
    if unit == "turn":
        return [turns and list(turns) for turns in group.turn_rewards]
    pairs = zip(group.rewards, group.lengths, strict=True)  # a token has no reward, so use 0
    return [None if reward is None else [0.0] * length for reward, length in pairs]


def _gives_zero(advantage: Any, group: ScoredGroup) -> bool:
    try:
        return not np.any(advantage(group)[0])
    except Exception:  # noqa: BLE001 an advantage may need a larger group
        return False


def check_batch_credit(report: Report, batch_credit: Any, count: int) -> dict[str, bool]:
    """Call a batch credit on made-up batches. Return whether it leaves all credits unchanged.

    `count` is the number of advantages of a made-up rollout, which has two turns and five tokens.
    """

    def made_up_group(index: int, *rewards: float | None) -> Group:
        rollouts = tuple(made_up_rollout(reward, 2, 3) for reward in rewards)
        credits = (
            Credit(x, (x or 0.0,) * count, x is not None, by_token=count > 2) for x in rewards
        )
        return Group(index, _EXAMPLE, 0, rollouts, tuple(credits))

    batches: list[list[tuple[float | None, ...]]] = [
        [(0.5, -0.5, 0.0, None), (0.75, -0.25, -0.25, -0.25)],
        *([(0.0, 0.0), (0.0, 0.0)], [(1.0, None)], [(None, None)], []),
    ]
    same = []
    for batch in batches:
        with report.calling("batch_credit", batch_credit, f"groups with the rewards {batch}"):
            groups = [made_up_group(i, *rewards) for i, rewards in enumerate(batch)]
            try:
                made = apply_batch_credit(groups, batch_credit)
            except RunFailed as error:
                raise BadResult(str(error).removeprefix("the batch credit ")) from error
            for credit in (credit for after in made for credit in after.credits):
                _require_numbers(credit.advantages, [*credit.advantages])
            same.append([g.credits for g in groups] == [after.credits for after in made])
    return {"batch_credit_is_neutral": all(same)}


def check_aggregation(report: Report, aggregation: Any) -> dict[str, bool]:
    """Return whether an aggregation takes turn lengths, and whether it weighs rollouts equally."""
    lengths, groups = [5, 3, 0, 8], [0, 0, 1, 1]
    forms: list[list[Any]] = [lengths, [[2, 3], [3], [], [4, 4]]]
    trials = [Report(), Report()]
    for by_turn, (given, trial) in enumerate(zip(forms, trials, strict=True)):
        what = f"the lengths {given}"
        with trial.calling("aggregation", aggregation, what):
            weights = aggregation(given, groups)
            _require_numbers(weights, given, "turn" if by_turn else "")
            totals = [] if by_turn else [w * n for w, n in zip(weights, lengths, strict=True) if n]
            return {
                "aggregation_takes_turns": bool(by_turn),
                "aggregation_weighs_sequences": bool(totals) and max(totals) - min(totals) < 1e-9,
            }
    report.problems += trials[0].problems
    return {}


def _require_numbers(result: Any, items: list[Any], part: str = "", unit: str = "rollout") -> None:
    """Raise BadResult unless `result` has a finite number per item, or per `part` of each item."""
    is_list = isinstance(result, Sequence | np.ndarray)
    if not is_list or len(result) != len(items):
        kind = "lists" if part else "numbers"
        what = f"{len(result)} {kind}" if is_list else f"a {type(result).__name__}"
        raise BadResult(f"returned {what} instead of {len(items)} {kind}: return one per {unit}")
    for number, item in zip(result, items, strict=True):
        if part:
            if item is not None:
                _require_numbers(number, item, unit=f"{part} of a rollout")
        elif not isinstance(number, int | float | np.number) or not math.isfinite(number):
            raise BadResult(
                f"returned {number!r} instead of a finite number: return one for each "
                f"{unit}, for example 0"
            )


def check_truncation(
    report: Report, truncation: Any, shaping: Any, max_seq_len: int
) -> dict[str, bool]:
    """Call truncation and reward shaping. Return whether the truncation makes a reward negative."""
    rollouts = [
        *(made_up_rollout(reward, 2, 3) for reward in (0.0, 1.0, None)),
        *(made_up_rollout(reward, max_seq_len, cut_off=True) for reward in (0.0, 1.0, None)),
        made_up_rollout(1.0, max_seq_len, cut_off=True, turn_limit=max_seq_len),
        made_up_rollout(0.0, max_seq_len, cut_off=True, turn_limit=max_seq_len),
        made_up_rollout(0.5),  # a rollout without tokens
    ]
    credits: list[Credit] = []
    # Ignore KeyError, because a made-up rollout whose reward is None has no named rewards.
    with report.calling("truncation", truncation, "a made-up rollout", ignored=KeyError):
        for rollout in rollouts:
            credit = truncation(rollout)
            if not isinstance(credit, Credit):
                raise BadResult(
                    f"returned a {type(credit).__name__}: return Credit(reward, trains=...) of "
                    "rl/records.py"
                )
            credits.append(credit)
    with report.calling("reward", shaping, "a made-up group"):
        if not isinstance(shaping, RewardShaping):
            raise BadResult(
                "is not a RewardShaping: derive it from rl.rollouts.credit.RewardShaping"
            )
        group = scored_group(_EXAMPLE, rollouts[: len(credits)], credits, {"reward": 1.0})
        _require_numbers(shaping.penalties(group), list(group.rewards))
    return {"truncation_lowers_rewards": any((credit.reward or 0.0) < 0 for credit in credits)}
