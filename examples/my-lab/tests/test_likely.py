"""Compare the probability of the right answer with a value worked by hand."""

import asyncio
import math
from typing import Any, cast

import pytest

from envs.episode import Episode
from envs.messages import Message, assistant
from envs.protocol import PolicyTurn
from my_lab.likely import Likely

KNOBS = {"max_operand": 9, "operators": ["+"], "num_train": 1, "num_eval": 1}
ENV = Likely(**KNOBS, reward_weights={"likely": 1.0})


class Policy:
    """A policy that says `text`, and gives the tokens of any text the probabilities 1/2 and 1/4."""

    def __init__(self, text: str) -> None:
        self.text, self.scored = text, ("", "")

    async def __call__(self, messages: list[Message], tools: object, /) -> PolicyTurn:  # noqa: ARG002
        return PolicyTurn(assistant(self.text), False, 1, 1)

    async def logprobs(
        self,
        messages: list[Message],  # noqa: ARG002
        text: str,
        *,
        after: str = "",
    ) -> list[float]:
        self.scored = text, after
        return [math.log(0.5), math.log(0.25)]


@pytest.mark.parametrize(
    ("said", "reasoning"), [("3 and 4, so 8", "3 and 4, so "), ("8", ""), ("", "")]
)
def test_the_right_answer_takes_the_place_of_the_last_word(said: str, reasoning: str) -> None:
    (example,) = ENV.examples("train")
    episode, policy = Episode(example, [*example.messages, assistant(said)]), Policy(said)
    asyncio.run(ENV.play(episode, cast("Any", policy)))
    assert policy.scored == (example.info["answer"], reasoning)
    assert asyncio.run(ENV.score(episode))["likely"] == pytest.approx(0.375)
