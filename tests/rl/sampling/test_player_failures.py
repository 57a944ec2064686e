"""What an environment does wrong costs that rollout; what the engine does wrong is no rollout."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from envs.episode import Example, StopReason
from rl.inference.completion import GenerationError
from rl.inference.live_version import LiveVersion
from rl.sampling.clock import Seats
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import (
    HI,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    play,
    scoring,
    tiny_renderer,
)
from tests.support.virtual_time import run_virtually


def test_a_hanging_environment_costs_one_rollout_and_keeps_its_tokens():
    class Hanging(ScriptedEnv):
        async def score(self, episode):
            if episode.text == "bad":
                await asyncio.sleep(1e9)
            return await super().score(episode)

    hung, fine = play(Hanging(), ScriptedClient("bad", "good"), 2)

    assert (hung.stop_reason, hung.reward) == (StopReason.TIMEOUT, None)
    assert "sampler.rollout_timeout=60 s" in hung.error
    assert hung.rows[0].num_completion == 4
    assert (fine.stop_reason, fine.reward) == (StopReason.STOP, 2.0)


@pytest.mark.parametrize("max_turns", [1, 2])
def test_an_engine_that_takes_too_long_costs_rollouts_not_the_run(max_turns):
    rollouts = play(ScriptedEnv(max_turns=max_turns), ScriptedClient("good", seconds=61), 2)

    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.TIMEOUT] * 2
    assert [rollout.rows for rollout in rollouts] == [(), ()]


def test_the_shared_request_counts_towards_the_time_of_its_rollouts():
    class Slow(ScriptedEnv):
        async def score(self, episode):
            await asyncio.sleep(20)
            return {"good": 1.0}

    (rollout,) = play(Slow(), ScriptedClient("good", seconds=50))

    assert rollout.stop_reason == StopReason.TIMEOUT


class Raising(ScriptedEnv):
    """Its reply or its score fails deep inside a library when the policy says "bad"."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    async def reply(self, episode, message):
        if self.method == "reply" and episode.text == "bad":
            json.loads("\n\nno json")  # line of reply
        return await super().reply(episode, message)

    async def score(self, episode):
        if self.method == "score" and episode.text == "bad":
            json.loads("\n\nno json")  # line of score
        return await super().score(episode)


@pytest.mark.parametrize("method", ["reply", "score"])
def test_an_environment_that_raises_costs_one_rollout_and_says_where_in_one_line(method):
    broken, fine = play(Raising(method), ScriptedClient("bad", "good"), 2)

    assert (fine.stop_reason, fine.reward, fine.error) == (StopReason.STOP, 2.0, "")
    assert (broken.stop_reason, broken.reward) == (StopReason.ENV_ERROR, None)
    assert broken.rows[0].num_completion == 4
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith(f"# line of {method}"))
    said = rf"Raising\.{method} raised JSONDecodeError: .+ \(test_player_failures\.py:{line}\)"
    assert re.fullmatch(said, broken.error)  # . is no line break


def _fail(*_):
    raise OSError("first\n\n  second")


async def _cancel(*_):
    raise asyncio.CancelledError("mine")


async def _give_up(*_):
    raise TimeoutError("my own")


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (_fail, "Mine.score raised OSError: first second (test_player_failures.py:"),
        (_cancel, "Mine.score raised CancelledError: mine ("),
        (_give_up, "Mine.score raised TimeoutError: my own ("),
        (lambda *_: asyncio.sleep(0, None), "Mine.score raised AttributeError: "),
        (lambda *_: asyncio.sleep(0, {"good": "much"}), "Mine.score raised ValueError: "),
    ],
    ids=["not async", "cancels", "its own timeout", "returns None", "no number"],
)
def test_whatever_a_score_does_wrong_is_an_error_of_the_environment(score, error):
    (rollout,) = play(scoring(score), ScriptedClient("good"))

    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENV_ERROR, None)
    assert rollout.error.startswith(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_unscorable_and_named(value):
    def score(self, episode):
        return asyncio.sleep(0, {"good": value if episode.text == "bad" else 1.0, "fine": 1.0})

    broken, fine = play(scoring(score), ScriptedClient("bad", "good"), 2)

    assert (broken.reward, fine.reward, fine.error) == (None, 2.0, "")
    assert broken.error == "Mine.score returned NaN or infinity for ['good']"
    assert broken.stop_reason == StopReason.STOP


@pytest.mark.parametrize(
    ("scored", "hint"),
    [
        ({"goood": 1.0}, "did you mean 'goood'? It returns 'goood'"),
        ({"other": 1.0}, "score does not return: It returns 'other'"),
    ],
)
def test_a_reward_that_is_weighted_and_never_scored_ends_the_run_at_once(scored, hint):
    with pytest.raises(ValueError, match="names 'good', which its score does not") as caught:
        play(scoring(lambda *_: scored), ScriptedClient("good"))

    assert hint in str(caught.value)


def test_what_has_no_weight_may_be_anything():
    env = scoring(lambda *_: {"good": 1.0, "off": float("nan"), "log": float("inf")})
    env.reward_weights = {"good": 2.0, "off": 0.0, "missing": 0.0}

    (rollout,) = play(env, ScriptedClient("good"))

    assert (rollout.reward, rollout.error) == (2.0, "")


@pytest.mark.parametrize("reply", [[{"content": "no role"}], 5], ids=["no role", "no list"])
def test_a_malformed_reply_is_an_error_of_the_environment(reply):
    class Malformed(ScriptedEnv):
        async def reply(self, episode, message):
            return reply

    (rollout,) = play(Malformed(max_turns=3), ScriptedClient("good"))

    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENV_ERROR, None)
    assert rollout.error.startswith("Malformed.reply raised ")


@pytest.mark.parametrize("max_turns", [1, 2])
def test_an_example_that_cannot_be_rendered_costs_its_group(max_turns):
    client = ScriptedClient("good")
    rollouts = play(ScriptedEnv(max_turns=max_turns), client, 2, messages=({"content": "no role"},))

    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.ENV_ERROR] * 2
    assert all(r.error.startswith("ScriptedEnv.examples (id 3) raised") for r in rollouts)
    assert client.requests == []


@pytest.mark.parametrize("max_turns", [1, 2])
def test_an_error_of_the_engine_is_not_the_environments_fault(max_turns):
    client = ScriptedClient(GenerationError("vLLM answered 500"))

    with pytest.raises(GenerationError, match="answered 500"):
        play(ScriptedEnv(max_turns=max_turns), client, 2)


def test_cancelling_a_group_cancels_it_and_blames_nobody():
    class Hanging(ScriptedEnv):
        async def score(self, episode):
            asyncio.current_task().cancel()
            return await super().score(await asyncio.sleep(1, episode))

    with pytest.raises(asyncio.CancelledError):
        play(Hanging(), ScriptedClient("good"))


def test_a_score_that_blocks_runs_in_a_thread_of_its_own():
    threads = []

    def score(self, episode):
        threads.append(threading.current_thread())
        return {"good": 1.0}

    (rollout,) = play(scoring(score), ScriptedClient("good"))

    assert rollout.reward == 2.0
    assert threads[0] is not threading.main_thread()


def failing(times):
    """An environment whose score raises the first `times` times."""
    left = [times]

    async def score(self, episode):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("the judge is busy")
        return {"good": float(episode.text == "good")}

    return scoring(score)


@pytest.mark.parametrize(
    ("failures", "reward", "retries", "requests"), [(1, 2.0, 1, 2), (2, 2.0, 2, 3), (3, None, 2, 3)]
)
def test_a_rollout_that_the_environment_broke_is_played_again(failures, reward, retries, requests):
    client = ScriptedClient("good")
    sampler = replace(SAMPLER, max_retries=2)

    (rollout,) = play(failing(failures), client, sampler=sampler)

    assert (rollout.reward, rollout.retries, len(client.requests)) == (reward, retries, requests)
    assert rollout.rows[0].num_completion == 5


def test_an_environment_plays_no_more_episodes_at_once_than_it_allows():
    class Narrow(ScriptedEnv):
        max_concurrent, inside, most = 2, 0, 0

        async def reply(self, episode, message):
            Narrow.inside += 1
            Narrow.most = max(Narrow.most, Narrow.inside)
            await asyncio.sleep(1)
            Narrow.inside -= 1

    play(Narrow(max_turns=2), ScriptedClient("good"), 6)

    assert Narrow.most == 2


def test_waiting_for_a_place_of_the_environment_is_no_time_of_the_rollout():
    class Narrow(ScriptedEnv):
        max_concurrent = 1

        async def score(self, episode):
            await asyncio.sleep(50)  # of 60
            return {"good": 1.0}

    rollouts = play(Narrow(), ScriptedClient("good"), 12)

    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 12


@pytest.mark.parametrize("max_turns", [1, 2])
def test_waiting_for_a_seat_in_vllm_is_no_time_of_the_rollout(max_turns):
    client = ScriptedClient("good", seconds=50)
    most = [0, 0]

    class Counting(RendererChat):
        async def generate(self, prompt, n, seed=None):
            most[0] += n
            most[1] = max(most)
            completions = await super().generate(prompt, n, seed)
            most[0] -= n
            return completions

    chat = Counting(SAMPLER, tiny_renderer(), client, 256, LiveVersion(7), Seats(4))
    player = Player(SAMPLER, ScriptedEnv(max_turns=max_turns), chat)
    example = Example(id=3, env="scripted", messages=list(HI))

    async def groups():
        return await asyncio.gather(*(player.play_group(i, example, 3) for i in range(5)))

    rollouts = [rollout for group in run_virtually(groups()) for rollout in group]

    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 15
    assert most[1] == (3 if max_turns == 1 else 4)


def test_a_slow_completion_costs_only_itself_where_completions_may_be_long():
    class Uneven(ScriptedClient):
        async def generate(self, prompt_ids, sampling, *, n, version):
            completions = await super().generate(prompt_ids, sampling, n=n, version=version)
            if any(len(completion.token_ids) > 50 for completion in completions):
                await asyncio.sleep(61)
            return completions

    long = replace(SAMPLER, max_tokens=100)
    slow, fine = play(ScriptedEnv(), Uneven("x" * 99, "good"), 2, sampler=long)

    assert (slow.stop_reason, fine.stop_reason) == (StopReason.TIMEOUT, StopReason.STOP)
    assert fine.reward == 2.0


def test_the_turns_of_an_environment_that_asks_for_two_at_once_are_timed_once():
    class Twofold(ScriptedEnv):
        holds_conversation = True

        async def play(self, episode, speak):
            await asyncio.gather(speak(list(HI), None), speak(list(HI), None))
            await asyncio.sleep(30)

    client = ScriptedClient("good", seconds=20)
    (fine,) = play(Twofold(), client)
    assert fine.stop_reason is StopReason.STOP
    client.seconds = 31
    (late,) = play(Twofold(), client)
    assert late.stop_reason is StopReason.TIMEOUT


def test_an_episode_is_closed_however_it_ended():
    closed = []

    class Holding(ScriptedEnv):
        async def score(self, episode):
            if episode.text == "hang":
                await asyncio.sleep(1e9)
            return {"good": 1 / (episode.text == "good")}

        def close(self, episode):
            closed.append(episode.text)
            raise OSError("already gone")

    rollouts = play(Holding(), ScriptedClient("good", "bad", "hang"), 3)

    assert sorted(closed) == ["bad", "good", "hang"]
    assert [r.stop_reason for r in rollouts] == ["stop", "env_error", "timeout"]
