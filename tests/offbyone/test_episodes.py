"""An episode that `verifiers` plays with one of our environments."""

import math

import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant, user
from envs.mixture import Mixture
from envs.protocol import Environment
from offbyone.episodes import PlayedEpisode


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


def played(**options) -> PlayedEpisode:
    return PlayedEpisode(Asking(**options), Example(0, "asking", [user("hi")]))


async def test_an_episode_ends_with_its_last_turn_and_not_before():
    episode = played()
    assert await episode.take_turn(assistant("one"), cut_off=False) == [user("again")]
    assert episode.episode.stop_reason is None
    assert await episode.take_turn(assistant("two"), cut_off=False) is None
    assert episode.episode.stop_reason == StopReason.MAX_TURNS
    assert episode.episode.turns == 2
    assert [message["content"] for message in episode.episode.messages] == [
        *("hi", "one", "again", "two")
    ]
    finished = played()
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
    episode = PlayedEpisode(
        Mixture(envs={"asking": asking}, weights={"asking": 1.0}),
        Example(0, "asking", [user("hi")]),
    )
    assert episode.env is asking
    assert await episode.take_turn(assistant(said), cut_off=cut_off) is None
    assert (episode.episode.stop_reason, episode.episode.turns) == (reason, 1)
    assert [message["content"] for message in episode.episode.messages] == ["Brief.", "hi", said]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_not_finite_is_refused(reward):
    assert await played(reward=0.5).rewards() == {"good": 0.5}
    with pytest.raises(ValueError, match="score returned NaN or infinity"):
        await played(reward=reward).rewards()
