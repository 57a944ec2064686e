"""Computes the reward of a rollout: the weighted sum of the named rewards of `score`.

{"exact": 1.0}                  one number for the episode
{"exact": [1.0, 0.0, 1.0]}      one for each of its turns; the reward is their sum
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches

from envs.protocol import Environment


def weighted_sum(env: Environment, rewards: Mapping[str, float]) -> float | None:
    """Return the reward; None if a reward with a weight is NaN or infinite.

    Rewards without a weight, or with weight 0, are only logged and may be any number.
    """
    weights = {name: weight for name, weight in env.reward_weights.items() if weight}
    total = sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())
    return total if math.isfinite(total) else None


def check_names(env: Environment, rewards: Mapping[str, float]) -> None:
    """Raise ValueError if `score` lacks a weighted reward, which would always count as 0."""
    missing = [
        name for name, weight in env.reward_weights.items() if weight and name not in rewards
    ]
    if not missing:
        return
    close = get_close_matches(missing[0], rewards, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"reward_weights of the environment {env.name!r} names {', '.join(map(repr, missing))}, "
        f"which its score does not return: {hint}It returns {', '.join(map(repr, rewards))}. Where "
        "a reward does not apply to an example, score it as 0.0"
    )
