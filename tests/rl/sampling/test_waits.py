"""When no rollout finishes for a minute it is said what they wait for; an error is logged once."""

import asyncio
import logging
from dataclasses import replace

import pytest

from envs.episode import Example
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, play, tiny_renderer
from tests.support.virtual_time import run_virtually

EXAMPLE = Example(id=3, env="scripted", messages=list(HI))
PATIENT = replace(SAMPLER, rollout_timeout=1e6)


class Slow(ScriptedEnv):
    """Takes 40 s for its reply, after each of two turns."""

    max_concurrent = 1

    def __init__(self, max_concurrent=1):
        super().__init__(max_turns=2)
        self.max_concurrent = max_concurrent

    async def reply(self, episode, message):
        await asyncio.sleep(40)
        return [{"role": "user", "content": "go on"}]


async def told(env, seconds, after) -> str:
    """What is said of three rollouts that have been played for so long; a turn takes `seconds`."""
    client = ScriptedClient("x", seconds=seconds)
    chat = RendererChat(PATIENT, tiny_renderer(), client, 256, LiveVersion(7))
    player = Player(PATIENT, env, chat)
    group = asyncio.create_task(player.play_group(0, EXAMPLE, 3))
    await asyncio.sleep(after)
    sentence = player.waits.standstill()
    group.cancel()
    return sentence


@pytest.mark.parametrize(
    ("env", "seconds", "after", "sentence"),
    [
        (Slow(), 50, 59, ""),
        (Slow(), 50, 95, "1 for vLLM, 2 for a place in it (max_concurrent)"),
        (Slow(3), 50, 80, "3 for the environment"),
        (Slow(3), 10, 130, ""),  # all are done
        (Slow(), 1, 130, ""),  # the first is done, and the second is on its way
        (ScriptedEnv(), 1e3, 70, "3 for vLLM"),
    ],
)
def test_what_rollouts_wait_for_is_said_after_a_minute_in_which_none_finished(
    env, seconds, after, sentence
):
    expected = sentence and f"none finished for {after} s, waiting: {sentence}"
    assert run_virtually(told(env, seconds, after)) == expected


def test_an_error_of_an_environment_is_in_the_log_at_once_and_once(caplog):
    class Broken(ScriptedEnv):
        async def score(self, episode):
            raise OSError("the server died")

    with caplog.at_level(logging.WARNING):
        play(Broken(), ScriptedClient("x"), 3)
    assert caplog.text.count("scripted: Broken.score raised OSError: the server died") == 1
