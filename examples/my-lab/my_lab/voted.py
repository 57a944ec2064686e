"""Arithmetic without right answers: a rollout is rewarded if it agrees with most of its group.

TTRL, arXiv:2504.16084. The reward `correct` of the arithmetic environment is only logged.
"""

from collections import Counter
from collections.abc import Sequence

from envs.arithmetic import Arithmetic
from envs.episode import Episode


class Voted(Arithmetic):
    """Questions `a op b =` whose answer is voted."""

    REWARDS = ("correct", "agrees")

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """Return `agrees`: 1 for the most common answer. The first of equally common ones wins."""
        answers = [episode.text.strip() for episode in episodes]
        ((winner, _),) = Counter(answers).most_common(1)
        return [{"agrees": float(answer == winner)} for answer in answers]
