"""Compute the metrics of an evaluation from its rollouts.

Reward metrics exclude rollouts without a reward (environment error, timeout) instead of using 0.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from envs.episode import Example
from rl.records import Rollout

_MAX_TURN_REWARDS = 8  # only the first 8 turns of a rollout get means of their own


@dataclass(frozen=True, eq=False)
class PlayedExample:
    example: Example
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts if r.reward is not None]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The metrics of one evaluation. Shares are in 0..1. A metric without a value is NaN."""

    num_examples: int
    num_rollouts: int
    num_scored: int
    reward: float  # mean reward
    reward_standard_error: float  # standard error of `reward`, clustered by example
    passes: dict[int, float]  # k -> pass@k; each role of an example counts as one example
    zero_spread: float  # share of (example, role) pairs whose rollouts have equal rewards
    mean_length: float  # mean number of completion tokens
    max_length: int
    truncated: float  # share of rollouts that a token limit ended
    turns: float  # mean number of turns per rollout
    tool_calls: float  # mean number of tool calls per rollout
    tool_errors: float  # mean number of failed tool calls per rollout
    rewards: dict[str, float]  # result of `mean_rewards`
    stop_reasons: dict[str, float]  # stop reason -> share of the rollouts
    errors: dict[str, int]  # error text -> number of rollouts
    envs: dict[str, "Summary"] = field(default_factory=dict)  # environment of a mixture -> summary

    def metrics(self) -> dict[str, float]:
        values = {
            "reward": self.reward,
            "reward_standard_error": self.reward_standard_error,
            **{f"pass@{k}": share for k, share in self.passes.items()},
            "zero_spread": self.zero_spread,
            "mean_length": self.mean_length,
            "max_length": float(self.max_length),
            "truncated": self.truncated,
            "turns": self.turns,
            "errors": sum(self.errors.values()) / (self.num_rollouts or math.nan),
            **{f"reward/{name}": value for name, value in self.rewards.items()},
            **{f"stop/{reason}": share for reason, share in self.stop_reasons.items()},
            **{f"env/{name}/reward": env.reward for name, env in self.envs.items()},
        }
        if self.tool_calls:
            values |= {"tool_calls": self.tool_calls, "tool_errors": self.tool_errors}
        return {f"eval/{name}": value for name, value in values.items() if math.isfinite(value)}


def summarise(played: Sequence[PlayedExample], threshold: float) -> Summary:
    """Return the summary of an evaluation. A rollout passes if its reward is >= `threshold`."""
    by_env: dict[str, list[PlayedExample]] = defaultdict(list)
    for one in played:
        by_env[one.example.env].append(one)
    envs = {name: _summary(some, threshold) for name, some in by_env.items()}
    whole = _summary(played, threshold)
    return replace(whole, envs=envs) if len(envs) > 1 else whole


def _summary(played: Sequence[PlayedExample], threshold: float) -> Summary:
    rollouts = [rollout for one in played for rollout in one.rollouts]
    groups = [one.rewards for one in played]
    of_role = defaultdict[tuple[int, str], list[float | None]](list)
    for i, one in enumerate(played):
        for rollout in one.rollouts:
            of_role[i, rollout.role].append(rollout.reward)
    compared = [[r for r in rewards if r is not None] for rewards in of_role.values()]
    most = max(map(len, of_role.values()), default=0)
    means: dict[str, Any] = rollout_means(rollouts)
    return Summary(
        num_examples=len(played),
        num_rollouts=len(rollouts),
        num_scored=sum(map(len, groups)),
        reward=average([reward for group in groups for reward in group]),
        reward_standard_error=standard_error(groups),
        passes={2**i: pass_at_k(compared, 2**i, threshold) for i in range(most.bit_length())},
        zero_spread=zero_spread(compared),
        **means,
        rewards=mean_rewards(rollouts),
        stop_reasons=stop_reason_shares(rollouts),
        errors=dict(Counter(r.error for r in rollouts if r.error).most_common()),
    )


def average(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return sum(values) / len(values) if values else math.nan


def rollout_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over rollouts, and max_length, by metric name without `rollout/` or `eval/`."""
    lengths = [rollout.num_completion for rollout in rollouts]  # completion tokens per rollout
    return {
        "mean_length": average(lengths),
        "max_length": max(lengths, default=0),
        "turns": average([rollout.turns for rollout in rollouts]),
        "truncated": average([rollout.stop_reason.truncated for rollout in rollouts]),
        "tool_calls": average([rollout.tool_calls for rollout in rollouts]),
        "tool_errors": average([rollout.tool_errors for rollout in rollouts]),
    }


def mean_rewards(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each unweighted reward, and of its values in turn k as `<name>/turn_<k>`.

    A mean is over the finite values of scored rollouts. `<name>/nonfinite` counts NaN and infinity.
    """
    named: dict[str, list[float]] = defaultdict(list)
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    for name, rollout in product(names, rollouts):
        values = {name: rollout.rewards[name]} if name in rollout.rewards else {}
        turns = enumerate(rollout.turn_rewards.get(name, ())[:_MAX_TURN_REWARDS])
        for key, value in (values | {f"{name}/turn_{k}": value for k, value in turns}).items():
            if rollout.reward is not None or not math.isfinite(value):
                named[key].append(value)
    means = {name: average([*filter(math.isfinite, vs)]) for name, vs in named.items()}
    counts = {name: sum(not math.isfinite(v) for v in vs) for name, vs in named.items()}
    return means | {f"{name}/nonfinite": float(count) for name, count in counts.items() if count}


def stop_reason_shares(rollouts: Sequence[Rollout]) -> dict[str, float]:
    counts = Counter(str(rollout.stop_reason) for rollout in rollouts)
    return {reason: count / len(rollouts) for reason, count in counts.most_common()}


RewardGroups = Sequence[Sequence[float]]
"""One list per example, or per role of an example, with the rewards of its scored rollouts."""


def standard_error(groups: RewardGroups) -> float:
    """Return the standard error of the mean, clustered by example; NaN for 0 or 1 examples."""
    scored = [group for group in groups if group]
    if len(scored) < 2:
        return math.nan
    rewards = [reward for group in scored for reward in group]
    mean_reward = average(rewards)
    # The rollouts of an example are not independent, so deviations are summed per example first.
    squares = sum(sum(reward - mean_reward for reward in group) ** 2 for group in scored)
    return math.sqrt(len(scored) / (len(scored) - 1) * squares) / len(rewards)


def pass_at_k(groups: RewardGroups, k: int, threshold: float) -> float:
    """Return the estimated probability that at least one of k rollouts has reward >= threshold.

    Groups with fewer than k rewards are left out.
    """
    # Unbiased estimator for k rollouts drawn without replacement (arXiv:2107.03374).
    probabilities = [
        1 - math.comb(len(group) - passed, k) / math.comb(len(group), k)
        for group in groups
        if len(group) >= k
        for passed in [sum(reward >= threshold for reward in group)]
    ]
    return average(probabilities)


def zero_spread(groups: RewardGroups) -> float:
    """Return the share of groups with all rewards equal. Groups of 0 or 1 rewards do not count."""
    return average([max(group) - min(group) <= 1e-6 for group in groups if len(group) > 1])
