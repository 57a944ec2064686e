"""An Environment with a tool, in a package outside of this project."""

from envs.episode import Example
from envs.messages import user
from envs.protocol import Environment


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Adding(Environment):
    name = "adding"
    max_turns = 3
    tools = (add,)

    def __init__(self, *, reward, closed=None):
        self.reward_weights = {"right": 2.0}
        self.reward, self.closed = reward, closed

    def examples(self, split):
        return [Example(id=0, env=self.name, messages=[user("2 and 3?")], info={"answer": "5"})]

    async def reply(self, episode, message):
        if self.reward == "raise in reply":
            raise RuntimeError("no reply")
        return await super().reply(episode, message)

    async def score(self, episode):
        if self.reward == "raise":
            raise RuntimeError("no score")
        right = float(episode.text == episode.example.info["answer"])
        if self.reward is not None:
            return {"right": float(self.reward), "turns": 2.5}
        # Per turn: only the last turn earns.
        return {"right": [0.0] * (episode.turns - 1) + [right], "turns": 2.5}
