"""This project's environments by name, for programs without Hydra, and episodes that they play."""

import math

import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant, user
from envs.mixture import Mixture
from envs.protocol import Environment
from envs.reverse_text import ReverseText
from offbyone.environments import CONF, load, load_for_verifiers
from offbyone.episodes import PlayedEpisode


def test_a_name_is_its_yaml_file_with_options_changed():
    env = load("reverse-text", max_length=3, num_train=9, num_eval=7)
    assert isinstance(env, ReverseText)
    words = [example.info["answer"] for example in env.examples("eval")]
    assert [len(word) for word in words] == [3] * 7
    assert env.reward_weights == {"exact": 1.0, "similarity": 0.0}
    options = {"min_length": 1, "max_length": 2, "num_eval": 1, "reward_weights": {"exact": 1.0}}
    assert len(load("envs.reverse_text.ReverseText", num_train=3, **options).examples("train")) == 3


def test_a_system_prompt_is_set_in_every_environment_of_a_mixture():
    env = load("mixture", system_prompt="Be brief.")
    for pool in env.pools("train"):
        opening = env.environment_of(pool.examples[0]).add_system_prompt([user("hi")])
        assert opening == [{"role": "system", "content": "Be brief."}, user("hi")]


@pytest.mark.parametrize("file", sorted((CONF / "env").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_environment_loads_or_names_the_missing_option(file):
    if "???" in file.read_text():
        with pytest.raises(ValueError, match="has no default: pass"):
            load(file.stem)
    else:
        assert load(file.stem).name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reverse-texts", {}, "'reverse-texts' does not exist: did you mean reverse-text"),
        ("zzz", {}, "environment 'zzz' does not exist: choose one of agent, alphabet-sort, "),
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


class Asking(Environment):
    """An environment that asks again until the turn limit, and gives one reward."""

    name = "asking"
    max_turns = 2

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    async def reply(self, episode, message):
        return None if message["content"] == "done" else [user("again")]

    async def score(self, episode):
        return {"good": self.reward}


ASKED = Example(0, "asking", [user("hi")])


async def test_an_episode_ends_with_its_last_turn_and_not_before():
    played = PlayedEpisode(Asking(), ASKED)
    assert await played.take_turn(assistant("one"), cut_off=False) == [user("again")]
    assert played.episode.stop_reason is None
    assert await played.take_turn(assistant("two"), cut_off=False) is None
    assert (played.episode.stop_reason, played.episode.turns) == (StopReason.MAX_TURNS, 2)
    contents = [message["content"] for message in played.episode.messages]
    assert contents == ["hi", "one", "again", "two"]
    finished = PlayedEpisode(Asking(), ASKED)
    await finished.take_turn(assistant("one"), cut_off=False)
    assert await finished.take_turn(assistant("done"), cut_off=False) is None
    assert finished.episode.stop_reason == StopReason.STOP


@pytest.mark.parametrize(
    ("said", "cut_off", "reason"),
    [("done", False, StopReason.STOP), ("more", True, StopReason.MAX_TOKENS)],
)
async def test_an_episode_of_a_mixture_ends_before_the_turn_limit(said, cut_off, reason):
    asking = Asking()
    asking.system_prompt = "Brief."
    played = PlayedEpisode(Mixture(envs={"asking": asking}, weights={"asking": 1.0}), ASKED)
    assert played.env is asking
    assert await played.take_turn(assistant(said), cut_off=cut_off) is None
    assert (played.episode.stop_reason, played.episode.turns) == (reason, 1)
    contents = [message["content"] for message in played.episode.messages]
    assert contents == ["Brief.", "hi", said]


async def test_a_reward_that_is_not_finite_is_refused():
    assert await PlayedEpisode(Asking(0.5), ASKED).rewards() == {"good": 0.5}
    for reward in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="score returned NaN or infinity"):
            await PlayedEpisode(Asking(reward), ASKED).rewards()
