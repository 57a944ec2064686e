"""Test the exercises that the policy proposes, with given answers."""

import asyncio
import json
from random import Random
from typing import Any, cast

import pytest

from envs.episode import Episode
from envs.messages import Message, assistant
from envs.protocol import PolicyTurn
from my_lab.proposer import Proposer


def made() -> Proposer:
    return Proposer(max_operand=19, num_seeds=3, num_eval=5)


def play(env: Proposer, *answers: str) -> dict[str, Any]:
    """Play one proposal. Return the reward of each role that spoke."""
    said = iter(answers)
    roles: dict[str, Any] = {}

    async def speak(messages: list[Message], tools: object, *, role: str = "") -> PolicyTurn:  # noqa: ARG001
        roles[role] = None
        return PolicyTurn(assistant(next(said)), False, 1, 1)

    async def scored() -> dict[str, Any]:
        (example,) = env.pools("train")[1].examples
        episode = Episode(example, [])
        await env.play(episode, cast("Any", speak))
        for episode.role in roles:
            roles[episode.role] = (await env.score(episode))["reward"]
        return roles

    return asyncio.run(scored())


@pytest.mark.parametrize(
    ("answers", "rewards", "kept"),
    [
        (["7+12", "19", "20"], {"proposer": 1.0, "solver": [1.0, 0.0]}, True),
        (["7+12", "19", "19"], {"proposer": 0.0, "solver": [1.0, 1.0]}, False),
        (["7+12", "18", "20"], {"proposer": 0.0, "solver": [0.0, 0.0]}, False),
        (["7+20"], {"proposer": 0.0}, False),
        (["hello"], {"proposer": 0.0}, False),
    ],
)
def test_a_sum_that_is_solved_half_of_the_time_is_kept(
    answers: list[str], rewards: dict[str, Any], kept: bool
) -> None:
    env = made()
    before = len(env.examples("train"))
    assert play(env, *answers) == rewards
    assert len(env.examples("train")) == before  # unchanged until the next version
    env.begin_version(1)
    texts = [example.messages[0]["content"] for example in env.examples("train")]
    assert (texts[before:] == ["7+12"]) is kept


def test_a_held_out_sum_is_neither_solved_nor_kept_nor_shown() -> None:
    env = made()
    held_out = [example.messages[0]["content"] for example in env.examples("eval")]
    assert len(set(held_out)) == 5
    assert play(env, held_out[0]) == {"proposer": 0.0}
    shown = env.demonstrations(Random(0))
    assert not {message["content"] for _ in range(2000) for message in next(shown)} & {*held_out}


def test_a_resumed_run_has_the_same_exercises() -> None:
    env, resumed = made(), made()
    play(env, "7+12", "19", "0")
    env.begin_version(1)
    play(env, "8+12", "20", "0")
    resumed.load(json.loads(json.dumps(env.state())))
    for each in (env, resumed):
        each.begin_version(2)
    assert resumed.examples("train") == env.examples("train")
    assert env.examples("train")[-1].info["answer"] == "20"
