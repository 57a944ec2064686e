"""This project's environments by name, for programs without Hydra, and episodes that they play."""

import math

import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant, user
from envs.mixture import Mixture
from envs.reverse_text import ReverseText
from offbyone.environments import load, load_for_verifiers
from offbyone.episodes import PlayedEpisode
from tests.support.scripted import ScriptedEnv, scoring


def test_a_name_is_its_yaml_file_with_options_changed():
    env = load("reverse-text", max_length=3, num_train=9, num_eval=7)
    assert isinstance(env, ReverseText)
    words = [example.info["answer"] for example in env.examples("eval")]
    assert [len(word) for word in words] == [3] * 7
    assert env.reward_weights == {"exact": 1.0, "similarity": 0.0}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reverse-texts", {}, "'reverse-texts' does not exist: did you mean reverse-text"),
        ("arithmetic", {"max_operant": 3}, "Arithmetic.max_operant is not an option: remove"),
        ("verifiers", {}, r"verifiers\.id has no default: pass"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_refused_with_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


def test_an_environment_that_compares_a_group_is_not_exported(monkeypatch):
    async def score_group(self, episodes):
        return [{} for _ in episodes]

    monkeypatch.setattr(ReverseText, "score_group", score_group)
    for name in ("reverse-text", "mixture"):  # the mixture contains reverse-text
        with pytest.raises(ValueError, match=f"{name} compares the episodes of a group"):
            load_for_verifiers(name)


ASKED = Example(0, "scripted", [user("hi")])


@pytest.mark.parametrize(
    ("replies", "cut_off", "turns", "reason"),
    [
        ((), False, 1, StopReason.STOP),
        (("again",), True, 1, StopReason.MAX_TOKENS),
        (("again", "again"), False, 2, StopReason.MAX_TURNS),
    ],
)
async def test_an_episode_of_a_mixture_ends_with_its_last_turn_and_not_before(
    replies, cut_off, turns, reason
):
    env = ScriptedEnv(replies, max_turns=2)
    env.system_prompt = "Brief."
    env.score = lambda episode: {"good": [0.25] * episode.turns}
    played = PlayedEpisode(Mixture(envs={"scripted": env}, weights={"scripted": 1.0}), ASKED)
    for _ in range(turns - 1):
        assert await played.take_turn(assistant("one"), cut_off=False) == [user("again")]
        assert played.episode.stop_reason is None
    assert await played.take_turn(assistant("two"), cut_off=cut_off) is None
    assert (played.episode.stop_reason, played.episode.turns) == (reason, turns)
    assert await played.rewards() == {"good": 0.25 * turns}  # the sum
    contents = [message["content"] for message in played.episode.messages]
    assert contents == ["Brief.", "hi", *["one", "again"] * (turns - 1), "two"]


async def test_a_reward_that_is_not_finite_is_refused():
    for reward in (math.nan, math.inf, -math.inf):

        async def score(self, episode, reward=reward):
            return {"good": reward}

        with pytest.raises(ValueError, match="score returned NaN or infinity"):
            await PlayedEpisode(scoring(score), ASKED).rewards()
