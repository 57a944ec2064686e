"""A conversation whose tools change in the middle."""

from envs.messages import user
from envs.protocol import Environment
from tests.support.scripted import HI, ScriptedClient, play

TOOLS = [{"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}]


class Changing(Environment):
    """Takes a tool away, or leaves it, between two turns."""

    name = "changing"
    holds_conversation = True
    reward_weights = {"one": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, then):
        self.then = then

    async def play(self, episode, speak):
        spoken = await speak(list(HI), TOOLS)
        await speak([*HI, spoken.message, user("more")], self.then)

    async def score(self, episode):
        return {"one": 1.0}


def test_the_prompt_says_which_tools_there_are_now():
    for tools, rows in ((list(TOOLS), 1), (None, 2)):
        client = ScriptedClient("good")
        (rollout,) = play(Changing(tools), client, max_seq_len=2000)
        assert len(rollout.sequences) == rows
        first, second = (bytes(t for t in ids if t < 256) for ids, *_ in client.requests)
        assert b"look" in first
        assert (b"look" in second) == (rows == 1)
