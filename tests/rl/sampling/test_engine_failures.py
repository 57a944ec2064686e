"""A request that vLLM fails costs its rollout, which is played again first; no neighbours."""

from dataclasses import replace

import pytest

from envs.episode import StopReason
from rl.inference.completion import RequestFailed
from tests.support.scripted import SAMPLER, ScriptedClient, ScriptedEnv, play

FAILED = RequestFailed("vLLM answered 500 to /inference/v1/generate")
AGAIN = replace(SAMPLER, max_retries=1)


class Swallowing(ScriptedEnv):
    """Holds the conversation itself and catches whatever it meets."""

    holds_conversation = True

    async def play(self, episode, speak):
        try:
            await speak(episode.messages, None)
        except Exception:  # noqa: BLE001
            return


@pytest.mark.parametrize("env", [ScriptedEnv(), ScriptedEnv(("go on",), 2), Swallowing()])
def test_a_request_that_failed_is_an_engine_error_of_its_rollout(env):
    (rollout,) = play(env, ScriptedClient(FAILED), sampler=AGAIN)
    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENGINE_ERROR, None)
    assert (rollout.error, rollout.retries) == (str(FAILED), 1)


@pytest.mark.parametrize(
    ("env", "failures"),
    [(ScriptedEnv(), 2), (Swallowing(), 1)],  # the request of the group, then the rollout's own
)
def test_a_rollout_whose_request_failed_is_played_again(env, failures):
    client = ScriptedClient(*[FAILED] * failures, "good")
    (rollout,) = play(env, client, sampler=AGAIN)
    assert (rollout.stop_reason, rollout.reward, rollout.retries) == (StopReason.STOP, 2.0, 1)


def test_where_the_shared_request_failed_each_rollout_asks_for_itself():
    rollouts = play(ScriptedEnv(), ScriptedClient(FAILED, "good", FAILED, "bad"), group_size=3)
    assert [rollout.reward for rollout in rollouts] == [2.0, None, 0.0]
