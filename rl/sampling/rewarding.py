"""The reward of a rollout: the weighted sum of its named rewards."""

import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from envs.protocol import Environment
from rl.records import Rollout


def with_rewards(
    env: Environment, rollout: Rollout, rewards: dict[str, float], checked: set[str]
) -> Rollout:
    """Return the rollout with these named rewards and their weighted sum.

    Raise ValueError if a weighted reward is missing, unless `checked` has the environment and role.
    """
    key = f"{env.name} {rollout.role}"
    if rewards and key not in checked:
        _check_names(env, rewards)
        checked.add(key)
    if rollout.role and not rewards:
        missing = f"{type(env).__name__}.score returned no reward for the role {rollout.role!r}"
        return replace(rollout, error=f"{missing}: return NaN if this role must not be trained")
    reward, error = _weighted_sum(env, rewards), ""
    if reward is None:
        broken = [name for name in rewards if not math.isfinite(rewards[name])]
        error = f"{type(env).__name__}.score (or score_group) returned NaN or infinity for {broken}"
    return replace(rollout, reward=reward, rewards=rewards, error=error)


def _weighted_sum(env: Environment, rewards: Mapping[str, float]) -> float | None:
    """Return the weighted sum; None if it is not finite. Rewards without a weight may be NaN."""
    weights = {name: weight for name, weight in env.reward_weights.items() if weight}
    total = sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())
    return total if math.isfinite(total) else None


def _check_names(env: Environment, rewards: Mapping[str, float]) -> None:
    weighted = [name for name, weight in env.reward_weights.items() if weight]
    missing = [name for name in weighted if name not in rewards]
    if not missing:
        return
    close = get_close_matches(missing[0], rewards, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"reward_weights of the environment {env.name!r} names {', '.join(map(repr, missing))}, "
        f"but score() and score_group() returned only {', '.join(map(repr, rewards))}: {hint}"
        "Correct the name in reward_weights, or return 0.0 where a reward does not apply"
    )
