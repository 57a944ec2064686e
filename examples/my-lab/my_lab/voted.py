"""Arithmetic without right answers: a rollout is rewarded if it agrees with most of its group.

TTRL, arXiv:2504.16084. The reward `correct` of the arithmetic environment is only logged.
"""

from collections import Counter
from collections.abc import Sequence

from envs.arithmetic import Arithmetic
from envs.episode import Episode


class Voted(Arithmetic):
    """Questions `a op b =` whose reward is a majority vote of the group."""

    REWARDS = ("correct", "agrees")

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """Return `agrees`: 1 for the most common answer. Of equally common ones, the first wins."""
        answers = [episode.text.strip() for episode in episodes]
        ((winner, _),) = Counter(answers).most_common(1)
        return [{"agrees": float(answer == winner)} for answer in answers]
