"""An environment that is right and wrong by turns for a while, and then always the same."""

from collections.abc import Mapping, Sequence

from envs.episode import Episode, Example, Split
from envs.messages import user
from envs.protocol import Environment


class Teachable(Environment):
    """The first 24 rollouts score 0 and 1 by turns, all later ones `later`."""

    name = "teachable"

    def __init__(self, *, later: float, reward_weights: Mapping[str, float]) -> None:
        self.reward_weights, self.later, self.scored = reward_weights, later, 0

    def examples(self, split: Split) -> Sequence[Example]:
        """Ten, all the same."""
        return [Example(id=i, env=self.name, messages=[user("one word")]) for i in range(10)]

    async def score(self, episode: Episode) -> dict[str, float]:
        """By count alone."""
        self.scored += 1
        return {"right": self.scored % 2 if self.scored <= 24 else self.later}
