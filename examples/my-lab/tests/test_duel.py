"""Play the game of two roles with given answers."""

import asyncio
from typing import Any, cast

import pytest

from envs.episode import Episode
from envs.messages import Message, assistant
from envs.protocol import PolicyTurn
from my_lab.duel import ROLES, Duel

ENV = Duel(min_length=3, max_length=5, num_train=2, num_eval=1)


def played(*answers: str) -> tuple[list[dict[str, float]], list[tuple[str, str]]]:
    """Return the rewards of both roles, and (role, question) of each turn."""
    said, asked = iter(answers), []

    async def speak(messages: list[Message], tools: object, *, role: str = "") -> PolicyTurn:  # noqa: ARG001
        asked.append((role, messages[-1]["content"]))
        return PolicyTurn(assistant(next(said)), False, 1, 1)

    async def play() -> list[dict[str, float]]:
        episode = Episode(ENV.examples("train")[0], [])
        await ENV.play(episode, cast("Any", speak))
        scores = []
        for episode.role in ROLES:
            scores.append(await ENV.score(episode))
        return scores

    return asyncio.run(play()), asked


@pytest.mark.parametrize(
    ("answers", "won", "points"),
    [
        (["abc", "cba", "xyz", "zyx"], [0, 0], [1, 1]),
        (["abc", "cba", "wxyz", "zyab"], [-1, 1], [0.5, 1]),
        (["abcd", "dcb", "xyz", "zyx"], [1, -1], [1, 0.75]),
        (["abc", "cbaaaa", "xyz", "zyx"], [1, -1], [1, 0.5]),
        (["a!", "cba", "xyz", "zyx"], [-1, 1], [0, 1]),  # bad word: one point less, and abc instead
        (["abc", "", "toolong", "cba"], [1, -1], [1, -1]),
    ],
)
def test_the_better_reversal_of_the_other_role_s_word_wins(
    answers: list[str], won: list[int], points: list[float]
) -> None:
    scores, asked = played(*answers)
    assert [score["won"] for score in scores] == won
    assert [score["points"] for score in scores] == points
    assert [role for role, _ in asked] == ["first", "second", "second", "first"]
    word = answers[0] if answers[0].startswith("abc") else "abc"
    assert asked[1][1] == f"reverse: {word}"
