"""Arithmetic: rewards, held-out questions, refused options."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.arithmetic import Arithmetic
from envs.episode import Episode, Example

OPTIONS = {
    "max_operand": 20,
    "operators": ["+", "-", "*"],
    "num_train": 3000,
    "num_eval": 200,
    "reward_weights": {"correct": 1.0},
}


def make(**changes):
    return Arithmetic(**{**OPTIONS, **changes})


def score(example, said):
    messages = [*example.messages, {"role": "assistant", "content": said}]
    return asyncio.run(make().score(Episode(example=example, messages=messages, turns=1)))


@pytest.mark.parametrize(
    ("answer", "said", "correct"),
    [
        ("7", "7", 1),
        ("7", " 7\n", 1),
        ("-1", "-1", 1),
        ("7", "<think>3 and 4</think>\n\n7", 1),
        ("7", "<think>7", 0),
        ("7", "8", 0),
        ("7", "07", 0),
        ("7", "7.", 0),
        ("7", "-7", 0),
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
    env = make()
    for example in [*env.examples("eval"), *env.examples("train")]:
        assert example.info["answer"] == str(worked_out(example.messages[0]["content"]))
    assert {score(e, e.info["answer"])["correct"] for e in env.examples("eval")} == {1.0}
    for question, answer in islice(env.demonstrations(Random(0)), 200):
        assert answer == {
            "role": "assistant",
            "content": str(worked_out(question["content"])),
        }


def test_splits_and_demonstrations_share_no_question_with_eval():
    # 2 * 5 * 5 = 50 questions, 45 held out.
    env = make(max_operand=4, operators=["+", "*"], num_train=12, num_eval=45)
    held_out = {example.messages[0]["content"] for example in env.examples("eval")}
    train = [example.messages[0]["content"] for example in env.examples("train")]
    assert len(held_out) == 45
    assert len(set(train)) == 5  # the rest, repeated in order
    assert train == (train[:5] * 3)[:12]
    assert held_out.isdisjoint(train)
    shown = {messages[0]["content"] for messages in islice(env.demonstrations(Random(3)), 200)}
    assert shown == set(train)


def test_training_questions_repeat_only_when_there_are_too_few():
    assert len({e.messages[0]["content"] for e in make(num_train=1000).examples("train")}) == 1000
    assert len({e.messages[0]["content"] for e in make().examples("train")}) == 1323 - 200
    large = make(max_operand=10**9).examples("train")
    assert len({e.messages[0]["content"] for e in large}) == 3000


def test_the_same_options_give_the_same_examples():
    assert make().examples("train") == make().examples("train")
    assert make().examples("eval") == make(num_train=5).examples("eval")
    assert [e.id for e in make().examples("train")] == list(range(3000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operators": []}, "one or more of"),
        ({"operators": ["/"]}, "one or more of"),
        ({"operators": ["+", "+"]}, "each once"),
        ({"num_train": 0}, "num_train=0"),
        ({"num_eval": 1323}, "make 1323 questions; raise max_operand or lower num_eval"),
        ({"reward_weights": {"exact": 1.0}}, "exact.* use correct"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
