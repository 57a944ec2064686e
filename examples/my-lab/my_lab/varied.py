"""A buffer that rejects groups with too few different answers (last messages).

A reward that reads only the last message cannot distinguish rollouts with the same answer. Unlike
buffer=difficulty this buffer compares no rewards, so it keeps groups that failed in different
ways.
"""

from rl.records import Group
from rl.rollouts.buffer import FifoBuffer


class VariedBuffer(FifoBuffer):
    """A FifoBuffer that rejects groups with fewer than `min_answers` different last messages."""

    def __init__(self, *, min_answers: int) -> None:
        super().__init__()
        self.min_answers = min_answers

    def why_useless(self, group: Group) -> str:
        """Return the reason to reject a group (counted as buffer/rejected_<reason>), or ""."""
        answers = {str(rollout.messages[-1].get("content")) for rollout in group.rollouts}
        unanimous = "unanimous" if len(answers) < self.min_answers else ""
        return super().why_useless(group) or unanimous
