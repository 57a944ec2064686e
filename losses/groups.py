"""One group of rollouts with rewards, which is the input of advantage functions and reward shaping.

K: rollouts of the group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

SPREAD_TOLERANCE = 1e-6  # two numbers count as equal if they differ by at most this


class Source(IntEnum):
    """The origin of the tokens of a rollout."""

    POLICY = 0  # The policy sampled the rollout for this batch.
    REPLAY = 1  # The rollout was in an earlier batch. Its logprobs and versions are unchanged.
    DEMONSTRATION = 2  # No policy sampled the text, so its logprobs and versions are unknown.


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredGroup:
    """One group and its rewards. Advantage functions get rewards after truncation and penalties."""

    # With reward.normalise_each, an advantage function gets each named reward in turn as `rewards`:
    rewards: Sequence[float | None]  # [K] None: no score, or truncation dropped the rollout
    turn_rewards: Sequence[Sequence[float] | None]  # [K] each reward divided among the turns
    named_rewards: Sequence[Mapping[str, float]]  # [K] rewards by name, before the weighted sum
    lengths: Sequence[int]  # [K] number of completion tokens
    rollouts: Sequence[Any]  # [K] rl.records.Rollout: messages, turns, rows with the tokens
    example: Any = None  # the envs.episode.Example of the group

    @staticmethod
    def by_hand(rewards: Sequence[float | None], **others: Any) -> "ScoredGroup":
        """Return a group of rollouts with one turn and no tokens, for tests of an advantage."""
        fields = {
            "turn_rewards": [None if reward is None else (reward,) for reward in rewards],
            "named_rewards": [{} for _ in rewards],
            "lengths": [0] * len(rewards),
            "rollouts": [None] * len(rewards),
        }
        return ScoredGroup(rewards=rewards, **(fields | others))
