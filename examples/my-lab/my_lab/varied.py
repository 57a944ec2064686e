"""A buffer that rejects groups in which everybody said the same.

Where all rollouts of an example end in the same words, no reward can tell them apart, whatever the
advantage. Unlike a spread of rewards (buffer=difficulty) this does not look at rewards at all, so
groups that failed in different ways stay.
"""

from rl.records import Group
from rl.rollouts.buffer import FifoBuffer


class VariedBuffer(FifoBuffer):
    """FifoBuffer without groups of fewer than `min_answers` different last messages."""

    def __init__(self, *, min_answers: int) -> None:
        super().__init__()
        self.min_answers = min_answers

    def why_useless(self, group: Group) -> str:
        """Return a word, counted as buffer/rejected_<word>; another group is sampled instead."""
        answers = {str(rollout.messages[-1].get("content")) for rollout in group.rollouts}
        unanimous = "unanimous" if len(answers) < self.min_answers else ""
        return super().why_useless(group) or unanimous
