"""The tasks of the report card."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.episode import Episode
from envs.messages import assistant
from envs.trials import Trials


def trials(weights=None, **changes):
    plain = {"turns": 1, "copied": 0.0, "uneven": 0.0, "copy_tasks": 0.0}
    lengths = {"min_length": 3, "max_length": 3, "num_train": 100, "num_eval": 20}
    return Trials(**{**plain, **lengths, **changes}, reward_weights=weights or {"exact": 1.0})


def scored(env, example, *said, **place):
    messages = [m for text in said for m in (example.messages[0], assistant(text))]
    return asyncio.run(env.score(Episode(example, messages, turns=len(said), **place)))


def test_a_turn_is_right_copied_or_wrong_and_its_length_counts():
    env = trials()
    example = env.examples("eval")[0]
    word = example.info["words"][0]
    found = [scored(env, example, text) for text in (word[::-1], word, "x" * 64)]
    names = ("exact", "copied", "length")
    told = [tuple(one[name] for name in names) for one in found]
    assert told == [(1, 0, 3 / 32), (0, 1, 3 / 32), (0, 0, 1)]


def test_rewards_are_flipped_as_often_as_their_names_say():
    env = trials()
    example = env.examples("eval")[0]
    word = example.info["words"][0]
    found = [scored(env, example, word[::-1], number=number) for number in range(2000)]
    assert sum(one["flipped_10"] for one in found) / 2000 == pytest.approx(0.9, abs=0.03)
    assert sum(one["flipped_30"] for one in found) / 2000 == pytest.approx(0.7, abs=0.04)
    again = [scored(trials(), example, word[::-1], number=number) for number in range(20, 0, -1)]
    assert again == found[20:0:-1]  # also in another order, and after a resume
    flips = [one["flipped_30"] for one in found[:100]]
    for other, version in ((example, 1), (env.examples("eval")[2], 0)):
        said = other.info["words"][0][::-1]
        places = [{"number": number, "policy_version": version} for number in range(100)]
        assert [scored(env, other, said, **place)["flipped_30"] for place in places] != flips


def test_an_episode_of_several_turns_asks_for_other_words_and_scores_their_mean():
    env = trials(turns=3)
    example = env.examples("train")[0]
    words = example.info["words"]
    assert len({*words}) == 3
    episode = Episode(example, [*example.messages, assistant("x")], turns=1)
    asked = asyncio.run(env.reply(episode, assistant("x")))
    assert asked[0]["content"] == f"reverse: {words[1]}"
    assert asyncio.run(env.reply(Episode(example, [], turns=3), assistant("x"))) is None
    assert scored(env, example, words[0][::-1], "no", words[2][::-1])["exact"] == 2 / 3
    assert scored(env, example, words[0][::-1])["exact"] == 1 / 3
    assert scored(env, example, words[0])["copied"] == 1 / 3
    assert scored(env, example, "x" * 16, "x" * 16)["length"] == 1 / 3


def test_uneven_training_words_are_too_short_or_too_long():
    lengths = [len(one.info["words"][0]) for one in trials(uneven=0.8).examples("train")]
    assert [lengths.count(n) for n in (1, 3, 12)] == [40, 20, 40]
    assert {len(one.info["words"][0]) for one in trials(uneven=0.8).examples("eval")} == {3}


def test_the_second_skill_is_demonstrated_and_judged_but_not_trained():
    env = trials(copy_tasks=0.5)
    asked = [m[0]["content"].split(":")[0] for m in islice(env.demonstrations(Random(0)), 200)]
    assert 60 < asked.count("copy") < 140
    assert not any(one.info["is_copy"] for one in env.examples("train"))
    copies = [one for one in env.examples("eval") if one.info["is_copy"]]
    assert len(copies) == 10
    assert scored(env, copies[0], copies[0].info["words"][0])["kept"] == 1
    assert "kept" not in scored(env, env.examples("eval")[0], "x")


def test_demonstrations_copy_the_word_in_the_given_share():
    shown = islice(trials(copied=0.9).demonstrations(Random(0)), 300)
    pairs = [(question["content"][9:], answer["content"]) for question, answer in shown]
    assert sum(word == answer for word, answer in pairs) > 250
    assert all(answer in (word, word[::-1]) for word, answer in pairs)
    assert trials({"exact": 1.0, "similarity": 0.0}).reward_weights == {"exact": 1.0}
    with pytest.raises(ValueError, match="reward_weights"):
        trials({"length2": 1.0})
