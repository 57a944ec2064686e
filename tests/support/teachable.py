"""An environment that is right and wrong by turns for a while, and then always the same."""

from envs.episode import Episode
from envs.reverse_text import ReverseText


class Teachable(ReverseText):
    """The first 24 rollouts score 0 and 1 by turns; all later ones `later`."""

    def __init__(self, *, later: float, **knobs: object) -> None:
        super().__init__(**knobs)  # pyright: ignore[reportArgumentType]
        self.later, self.scored = later, 0

    async def score(self, episode: Episode) -> dict[str, float]:
        """By count alone."""
        del episode
        self.scored += 1
        return {"exact": self.scored % 2 if self.scored <= 24 else self.later, "similarity": 0.0}
