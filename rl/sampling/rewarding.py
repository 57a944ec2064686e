"""The reward of a rollout: the weighted sum of its named rewards."""

import math
from dataclasses import replace
from difflib import get_close_matches

from envs.protocol import Environment
from rl.records import Rollout


def with_rewards(
    env: Environment, rollout: Rollout, rewards: dict[str, float], checked: set[str]
) -> Rollout:
    """Return the rollout with these named rewards and their weighted sum.

    If a reward with a weight is missing or not finite, the rollout has no reward but an error (NaN
    for a role is no error). If it is missing in a role's first rollout, raise ValueError, because
    its name in reward_weights is probably wrong. `checked`: environments and roles already checked.
    """
    key, score = f"{env.name} {rollout.role}", f"{type(env).__name__}.score (or score_group)"
    weights = {name: weight for name, weight in env.reward_weights.items() if weight}
    missing = [name for name in weights if name not in rewards]
    if rewards and key not in checked:
        if missing:
            close = get_close_matches(missing[0], rewards, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"reward_weights of the environment {env.name!r} names "
                f"{', '.join(map(repr, missing))}, but score() and score_group() returned only "
                f"{', '.join(map(repr, rewards))}: {hint}Correct the name in reward_weights, or "
                "return 0.0 where a reward does not apply"
            )
        checked.add(key)
    if rollout.role and not rewards:
        error = f"{type(env).__name__}.score returned no reward for the role {rollout.role!r}"
        return replace(rollout, error=f"{error}: return NaN if this role must not be trained")
    if missing:
        names = ", ".join(map(repr, missing))
        error = f"{score} did not return {names}: return 0.0 where a reward does not apply"
        return replace(rollout, rewards=rewards, error=error)
    total = sum(weight * rewards[name] for name, weight in weights.items())
    if math.isfinite(total):
        return replace(rollout, reward=total, rewards=rewards)
    # NaN, unless it is in a list of turns, means that the environment does not train this role.
    numbers = (rewards[name] for name in weights if name not in rollout.turn_rewards)
    if rollout.role and any(map(math.isnan, numbers)):
        return replace(rollout, rewards=rewards)
    if broken := [name for name in weights if not math.isfinite(rewards[name])]:
        error = f"{score} returned NaN or infinity for {broken}"
    else:
        error = f"the weighted sum of {rewards} is too large: lower reward_weights or the rewards"
    return replace(rollout, rewards=rewards, error=error)
