"""Test the vote of a group with given answers."""

import asyncio

import pytest

from envs.episode import Episode
from envs.messages import assistant
from my_lab.voted import Voted

ENV = Voted(max_operand=9, operators=["+"], num_train=1, num_eval=1, reward_weights={"agrees": 1.0})


@pytest.mark.parametrize(
    ("said", "agrees"),
    [
        (["7", "8", "7"], [1, 0, 1]),
        (["8", "7"], [1, 0]),  # of equally common answers, the first wins
        (["", "", "7"], [1, 1, 0]),
        (["7"], [1]),
    ],
)
def test_the_most_common_answer_of_the_group_is_rewarded(
    said: list[str], agrees: list[int]
) -> None:
    (example,) = ENV.examples("train")
    episodes = [Episode(example, [*example.messages, assistant(text)]) for text in said]
    found = asyncio.run(ENV.score_group(episodes))
    assert [rewards["agrees"] for rewards in found] == agrees
