"""The reward of a rollout: the weighted sum of what `score` returned, by name.

{"exact": 1.0}                  one number for the episode
{"exact": [1.0, 0.0, 1.0]}      one for each of its turns; the reward is their sum
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches

from envs.protocol import Environment


def weighted_sum(env: Environment, rewards: Mapping[str, float]) -> float | None:
    """Return the reward; None where a number that counts is NaN or infinite.

    What has no weight, or the weight 0, is logged and may be anything.
    """
    weights = {name: weight for name, weight in env.reward_weights.items() if weight}
    total = sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())
    return total if math.isfinite(total) else None


def check_names(env: Environment, rewards: Mapping[str, float]) -> None:
    """ValueError where a weighted reward is not scored: it would count as 0 for the whole run."""
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
