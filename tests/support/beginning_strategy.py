"""A strategy whose four attempts begin in all ways: at the prompt, in a branch, after a text."""

from rl.sampling.prefix import prefix_of, turns_of
from rl.sampling.strategy import Strategy

TEXT = "ab"


class Beginning(Strategy):
    """Play a root, a branch inside its last turn, and texts that are masked and trained."""

    begins_turns = True

    def num_first(self, size):
        return 1

    async def play(self, group, play_one, size):
        example = group.example
        root = await play_one(example, seed=0)
        number = len(turns_of(root)) - 1
        middle = prefix_of(root, number, len(turns_of(root)[number].token_ids) // 2)
        return [
            root,
            await play_one(example, seed=1, prefix=middle, prefix_trains=True),
            await play_one(example, seed=2, prefix=TEXT),
            await play_one(example, seed=3, prefix=TEXT, prefix_trains=True),
        ]
