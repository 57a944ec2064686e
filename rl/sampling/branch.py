"""Strategy that branches attempts where the policy was uncertain, as ARPO does."""

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from rl.config.ranges import PositiveInt
from rl.records import Rollout
from rl.sampling.prefix import prefix_of, turns_of
from rl.sampling.strategy import PlayOne, StartedGroup, Strategy, play_attempts


class Branch(Strategy):
    """Play some attempts, then branch each of them where the policy was most uncertain.

    A branch begins with the attempt's tokens before this position, and the policy samples the rest.
    ARPO is published in arXiv:2507.19849.
    """

    begins_turns: ClassVar[bool] = True

    def __init__(
        self,
        *,
        branches: PositiveInt,
        at: Literal["token", "turn"],
        window: PositiveInt,
        prefix_trains: bool,
    ) -> None:
        self.branches, self.at, self.window = branches, at, window
        self.prefix_trains = prefix_trains

    def num_first(self, size: int) -> int:
        return -(-size // (1 + self.branches))

    async def play(self, group: StartedGroup, play_one: PlayOne, size: int) -> Sequence[Rollout]:
        roots = await play_attempts(group, play_one, range(self.num_first(size)))
        starts = [(root, *at) for root in roots if (at := self.position(root))]
        if not starts:  # no branch is possible: play independent attempts
            return [*roots, *await play_attempts(group, play_one, range(len(roots), size))]
        branches = []
        for seed in range(len(roots), size):
            prefix, trains = prefix_of(*starts[seed % len(starts)]), self.prefix_trains
            branches.append(play_one(group.example, seed=seed, prefix=prefix, prefix_trains=trains))
        return [*roots, *await asyncio.gather(*branches)]

    def position(self, rollout: Rollout) -> tuple[int, int] | None:
        """Return turn and token of the most uncertain position; None if no position is allowed.

        The rollout's first token is not allowed. at="turn" allows only the first tokens of turns.
        The uncertainty is the mean of -logprob of the next `window` tokens of the turn.
        """
        candidates = []  # (uncertainty, turn, token)
        for number, turn in enumerate(turns_of(rollout)):
            if -1 in turn.versions:  # the turn's branches would train tokens that no policy sampled
                continue
            first = 0 if number else 1  # a branch at the first token is an independent attempt
            last = len(turn.logprobs) - self.window if self.at == "token" else 0
            starts = np.arange(first, min(max(last, first) + 1, len(turn.logprobs)))
            if not len(starts) or (self.at == "turn" and not number):
                continue
            ends = np.minimum(starts + self.window, len(turn.logprobs))
            sums = np.cumsum([0.0, *turn.logprobs])
            means = (sums[starts] - sums[ends]) / (ends - starts)
            best = int(means.argmax())
            candidates.append((float(means[best]), number, int(starts[best])))
        return max(candidates)[1:] if candidates else None
