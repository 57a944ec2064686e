"""ReverseText: rewards, lengths, all existing words."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.episode import Episode, Example
from envs.reverse_text import ReverseText
from tests.envs.test_procedural import make


def scores(env, example, said):
    messages = [*example.messages, {"role": "assistant", "content": said}]
    return asyncio.run(env.score(Episode(example=example, messages=messages, turns=1)))


CAT = Example(id=0, env="reverse-text", messages=[], info={"answer": "tac"})


@pytest.mark.parametrize(
    ("said", "exact", "similarity"),
    [
        ("tac", 1, 1),
        ("<think>\ncat, so\n</think>\n\ntac", 1, 1),
        ("it ends in t</think>tac", 1, 1),
        ("<think>tac", 0, 0),  # reasoning without an end has no answer
        ("ta", 0, 2 / 3),
        ("taco", 0, 3 / 4),
        ("cat", 0, 1 / 3),
        ("TAC", 0, 0),
        ("ta c", 0, 2 / 4),
        ("", 0, 0),
        ("\ufffd\ufffd", 0, 0),
    ],
)
def test_rewards_of_an_answer_to_cat(said, exact, similarity):
    assert scores(make(ReverseText), CAT, said) == pytest.approx(
        {"exact": exact, "similarity": similarity}
    )


def test_the_expert_scores_one_on_its_own_and_on_every_example():
    env = make(ReverseText)
    for example in env.examples("eval"):
        word = example.messages[0]["content"].removeprefix("reverse: ")
        assert scores(env, example, word[::-1]) == {"exact": 1.0, "similarity": 1.0}
    for prompt, answer in islice(env.demonstrations(Random(0)), 50):
        assert prompt["content"] == f"reverse: {answer['content'][::-1]}"
        assert (prompt["role"], answer["role"]) == ("user", "assistant")


def test_lengths_lie_between_the_bounds_about_equally_often():
    lengths = [len(e.info["answer"]) for e in make(ReverseText).examples("train")]
    counts = [lengths.count(n) for n in range(3, 9)]
    assert sum(counts) == 2000
    assert min(counts) > 280


def test_a_run_can_use_all_existing_words():
    env = make(ReverseText, min_length=1, max_length=2, num_train=700, num_eval=2)
    words = {e.info["answer"] for split in ("train", "eval") for e in env.examples(split)}
    assert len(words) == 26 + 26**2


def test_words_may_be_longer_than_the_largest_numbered_length():
    env = make(ReverseText, min_length=13, max_length=300, num_train=400)
    words = [e.info["answer"] for split in ("train", "eval") for e in env.examples(split)]
    assert len(set(words)) == len(words) == 500
    assert {13, 300} <= set(map(len, words))
    assert next(env.demonstrations(Random(0)))
