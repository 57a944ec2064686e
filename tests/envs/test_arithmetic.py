"""Arithmetic: rewards, answers, repeated questions."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.arithmetic import Arithmetic
from envs.episode import Episode, Example
from tests.envs.test_procedural import make


def score(example, said):
    messages = [*example.messages, {"role": "assistant", "content": said}]
    return asyncio.run(make(Arithmetic).score(Episode(example=example, messages=messages, turns=1)))


@pytest.mark.parametrize(
    ("answer", "said", "correct"),
    [
        ("7", "7", 1),
        ("-1", "-1", 1),
        ("7", "<think>3 and 4</think>\n\n7", 1),
        ("7", "<think>7", 0),
        ("7", "8", 0),
        ("7", "07", 0),
        ("7", "3 + 4 = 7", 0),
        ("7", "", 0),
        ("7", "seven \ufffd", 0),
    ],
)
def test_reward_of_an_answer(answer, said, correct):
    example = Example(id=0, env="arithmetic", messages=[], info={"answer": answer})
    assert score(example, said) == {"correct": correct}


def worked_out(question):
    a, sign, b, _ = question.split()
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def test_answers_are_right_and_the_expert_gives_them():
    env = make(Arithmetic)
    for example in [*env.examples("eval"), *env.examples("train")]:
        assert example.info["answer"] == str(worked_out(example.messages[0]["content"]))
    assert {score(e, e.info["answer"])["correct"] for e in env.examples("eval")} == {1.0}
    for question, answer in islice(env.demonstrations(Random(0)), 200):
        assert answer == {"role": "assistant", "content": str(worked_out(question["content"]))}


def test_training_questions_repeat_in_order_when_there_are_too_few():
    # 2 * 5 * 5 = 50 questions, 45 held out.
    env = make(Arithmetic, max_operand=4, operators=["+", "*"], num_train=12, num_eval=45)
    train = [example.messages[0]["content"] for example in env.examples("train")]
    assert len({example.messages[0]["content"] for example in env.examples("eval")}) == 45
    assert len(set(train)) == 5
    assert train == (train[:5] * 3)[:12]
    shown = {messages[0]["content"] for messages in islice(env.demonstrations(Random(3)), 200)}
    assert shown == set(train)


def test_training_questions_differ_when_there_are_enough():
    assert (
        len({e.messages[0]["content"] for e in make(Arithmetic, num_train=1000).examples("train")})
        == 1000
    )
    assert len({e.messages[0]["content"] for e in make(Arithmetic).examples("train")}) == 1323 - 200
    large = make(Arithmetic, max_operand=10**9).examples("train")
    assert len({e.messages[0]["content"] for e in large}) == 3000
