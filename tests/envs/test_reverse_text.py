"""ReverseText: rewards, held-out words, refused options."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.episode import Episode, Example
from envs.reverse_text import ReverseText

OPTIONS = {
    "min_length": 3,
    "max_length": 8,
    "num_train": 2000,
    "num_eval": 100,
    "reward_weights": {"exact": 1.0, "similarity": 0.0},
}


def make(**changes):
    return ReverseText(**{**OPTIONS, **changes})


def scores(env, example, said):
    messages = [*example.messages, {"role": "assistant", "content": said}]
    return asyncio.run(env.score(Episode(example=example, messages=messages, turns=1)))


CAT = Example(id=0, env="reverse-text", messages=[], info={"answer": "tac"})


@pytest.mark.parametrize(
    ("said", "exact", "similarity"),
    [
        ("tac", 1, 1),
        ("  tac\n", 1, 1),
        ("<think>\ncat, so\n</think>\n\ntac", 1, 1),
        ("it ends in t</think>tac", 1, 1),
        ("<think>tac", 0, 0),  # without an end the reasoning counts as the answer
        ("tax", 0, 2 / 3),
        ("ta", 0, 2 / 3),
        ("taco", 0, 3 / 4),
        ("cat", 0, 1 / 3),
        ("act", 0, 0),
        ("TAC", 0, 0),
        ("ta c", 0, 2 / 4),
        ("", 0, 0),
        ("\ufffd\ufffd", 0, 0),
    ],
)
def test_rewards_of_an_answer_to_cat(said, exact, similarity):
    assert scores(make(), CAT, said) == pytest.approx({"exact": exact, "similarity": similarity})


def test_the_expert_scores_one_on_its_own_and_on_every_example():
    env = make()
    for example in env.examples("eval"):
        word = example.messages[0]["content"].removeprefix("reverse: ")
        assert scores(env, example, word[::-1]) == {"exact": 1.0, "similarity": 1.0}
    for prompt, answer in islice(env.demonstrations(Random(0)), 50):
        assert prompt["content"] == f"reverse: {answer['content'][::-1]}"
        assert (prompt["role"], answer["role"]) == ("user", "assistant")


def test_splits_and_demonstrations_share_no_word_with_eval():
    # 26 + 676 words, 600 of them held out: demonstrations nearly always have to draw again.
    env = make(min_length=1, max_length=2, num_train=102, num_eval=600)
    train = [example.messages[0]["content"] for example in env.examples("train")]
    held_out = {example.messages[0]["content"] for example in env.examples("eval")}
    assert len(set(train)) == len(train) == 102
    assert len(held_out) == 600
    assert held_out.isdisjoint(train)
    shown = {messages[0]["content"] for messages in islice(env.demonstrations(Random(3)), 500)}
    assert shown <= set(train)


def test_lengths_lie_between_the_bounds_about_equally_often():
    lengths = [len(e.info["answer"]) for e in make().examples("train")]
    counts = [lengths.count(n) for n in range(3, 9)]
    assert sum(counts) == 2000
    assert min(counts) > 280


def test_the_same_options_give_the_same_examples_and_the_same_rng_the_same_demonstrations():
    assert make().examples("train") == make().examples("train")
    assert make().examples("eval") == make(num_train=5).examples("eval")
    assert [e.id for e in make().examples("eval")] == list(range(100))
    first, again, other = (
        list(islice(make().demonstrations(Random(seed)), 20)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 9}, "min_length may not exceed"),
        ({"min_length": 0}, "at least 1"),
        ({"max_length": 3, "num_train": 17500}, "only 17576 words .* raise max_length"),
        ({"reward_weights": {"exakt": 1.0}}, "exakt.* use exact or similarity"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_run_can_use_all_existing_words():
    env = make(min_length=1, max_length=2, num_train=700, num_eval=2)
    words = {e.info["answer"] for split in ("train", "eval") for e in env.examples(split)}
    assert len(words) == 26 + 26**2


def test_words_may_be_longer_than_the_largest_numbered_length():
    env = make(min_length=13, max_length=300, num_train=400)
    words = [e.info["answer"] for split in ("train", "eval") for e in env.examples(split)]
    assert len(set(words)) == len(words) == 500
    assert {13, 300} <= set(map(len, words))
    assert next(env.demonstrations(Random(0)))
