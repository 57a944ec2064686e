"""MathPython: calls of its tool through the toolbox and the real sandbox."""

import asyncio
from itertools import islice
from random import Random
from typing import Any

from envs.episode import Episode, Example
from envs.maths.calculations import Calculations
from envs.maths.grading import Grader
from envs.maths.math_python import MathPython
from envs.maths.word_problems import WordProblems
from envs.messages import tool_call
from envs.sandbox.sandbox import Limits
from tests.support.sandboxes import interpreters, settled

OPTIONS = {
    "name": "math-python",
    "questions": Calculations(
        kinds=["product", "sum", "power", "binomial"], digits=4, num_train=30, num_eval=10
    ),
    "instruction": "Use the tool.",
    "grader": Grader(workers=1, cpu_seconds=5, memory_mb=1024, allow_without_landlock=False),
    "reward_weights": {"correct": 1.0},
    "max_turns": 4,
    "max_concurrent": 8,
    "sandbox": Limits(
        cpu_seconds=1,
        call_timeout=60.0,
        memory_mb=128,
        max_output_chars=200,
        site_packages=False,
        allow_without_landlock=False,
    ),
}


def make(**changes):
    return MathPython(**{**OPTIONS, **changes})


def fresh(question=None, answer="42"):
    return Episode(
        Example(0, "math-python", [], {"answer": answer}), [question] if question else []
    )


async def play(env, episode, *turns) -> Any:
    """Let the environment reply to assistant messages, and return its last reply."""
    reply = None
    for turn in turns:
        episode.messages.append(turn)
        reply = await env.reply(episode, turn)
        episode.messages += reply or []
    return reply


def code(text):
    return tool_call("python", code=text)


def test_the_expert_played_through_the_real_tool_scores_one():
    env = make()
    answers = {e.messages[0]["content"]: e.info["answer"] for e in env.examples("train")}
    assert len(answers) == 30

    async def rewards(question, call, told, last):
        episode = fresh(question, told["content"])
        reply = await play(env, episode, call)
        assert reply == [told]
        assert await play(env, episode, last) is None
        env.close(episode)
        return await env.score(episode)

    before = interpreters()
    for conversation in islice(env.demonstrations(Random(0)), 8):
        assert asyncio.run(rewards(*conversation)) == {
            "correct": 1.0,
            "format": 1.0,
            "unjudged": 0.0,
        }
    assert settled(before)


def test_each_episode_keeps_its_own_variables():
    env, one, other = make(), fresh(), fresh()

    async def talk():
        said = [await play(env, one, code("x = 5")), await play(env, one, code("x * 2"))]
        said.append(await play(env, other, code("x")))
        return [message["content"] for (message,) in said]

    first, second, third = asyncio.run(talk())
    assert (first, second) == ("(no output)", "10")
    assert third.endswith("NameError: name 'x' is not defined")
    env.close(one)
    env.close(other)
    assert (one.tool_calls, one.tool_errors) == (2, 0)


def test_a_call_that_breaks_a_limit_gets_an_error_message_and_the_next_call_works():
    env, episode = make(), fresh()

    async def talk():
        turns = code("while True: pass"), code("1 / 0"), code("6 * 7")
        return [(await play(env, episode, turn))[0]["content"] for turn in turns]

    endless, raised, right = asyncio.run(talk())
    env.close(episode)
    assert endless.startswith("Error: the code used up 1")
    assert "ZeroDivisionError" in raised
    assert right == "42"


def test_word_problems_can_be_played_with_the_tool_as_well():
    questions = WordProblems(min_steps=2, max_steps=4, num_train=5, num_eval=5)
    env = make(questions=questions)
    for _, call, told, _ in islice(env.demonstrations(Random(1)), 20):
        assert eval(call["tool_calls"][0]["function"]["arguments"]["code"]) == int(told["content"])
