"""An error of an environment or of vLLM costs one rollout, and the rollout names the cause."""

import asyncio
import json
import logging
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from envs.episode import Example, StopReason
from rl.inference.completion import GenerationError, RequestFailed
from rl.sampling.clock import CompletionSlots
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import (
    HI,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    play,
    scoring,
)
from tests.support.virtual_time import run_virtually

FAILED = RequestFailed("vLLM answered 500 to /inference/v1/generate")


@pytest.mark.parametrize("max_turns", [1, 2])
@pytest.mark.parametrize(("answering", "seconds"), [(61, 0), (50, 20)])
def test_the_time_of_the_server_counts_towards_the_timeout(max_turns, answering, seconds):
    async def score(self, episode):
        await asyncio.sleep(seconds)
        return {"good": 1.0}

    env = type("Mine", (ScriptedEnv,), {"score": score})(max_turns=max_turns)
    rollouts = play(env, ScriptedClient("bad", seconds=answering), 2)
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.TIMEOUT] * 2


@pytest.mark.parametrize("method", ["reply", "score"])
def test_an_error_of_an_environment_costs_one_rollout_and_names_the_line(method):
    async def fail(self, episode, *message):
        if episode.text == "bad":
            json.loads("\n\nno json")  # within a library, called in this line
        return await getattr(ScriptedEnv, method)(self, episode, *message)

    env = type("Raising", (ScriptedEnv,), {method: fail})()
    broken, fine = play(env, ScriptedClient("bad", "good"), 2)
    assert (fine.stop_reason, fine.reward, fine.error) == (StopReason.STOP, 2.0, "")
    assert (broken.stop_reason, broken.reward) == (StopReason.ENV_ERROR, None)
    assert broken.rows[0].num_completion == 4
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("in this line"))
    error = rf"Raising\.{method} raised JSONDecodeError: .+ \(test_player_failures\.py:{line}\)"
    assert re.fullmatch(error, broken.error)  # . is no line break


def raising(error: BaseException):
    def score(*_):
        raise error

    return scoring(score)


def replying(reply) -> ScriptedEnv:
    """Return an environment of several turns with this reply."""
    return type("Mine", (ScriptedEnv,), {"reply": lambda *_: reply})(max_turns=3)


def holding(play) -> ScriptedEnv:
    """Return an environment that holds the conversation."""
    return type("Holding", (ScriptedEnv,), {"holds_conversation": True, "play": play})()


async def _lose(self, episode, speak):
    await speak(list(HI), None)
    raise KeyError("lost")


async def _misuse(self, episode, speak):
    await speak(list(HI), None)
    with suppress(Exception):
        await speak([{"no": "role"}], None)


async def _swallow(self, episode, speak):
    with suppress(Exception):
        await speak(episode.messages, None)


@pytest.mark.parametrize(
    ("env", "error"),
    [
        (raising(OSError("a\n\n  b")), "Mine.score raised OSError: a b (test_player_"),
        (raising(OSError("x" * 301)), f"Mine.score raised OSError: {'x' * 300} (test_player_"),
        (raising(asyncio.CancelledError("x")), "Mine.score raised CancelledError: x"),
        (raising(TimeoutError("own")), "Mine.score raised TimeoutError: own ("),
        (scoring(lambda *_: None), "Mine.score raised AttributeError: "),
        (scoring(lambda *_: {"good": "much"}), "Mine.score raised ValueError: "),
        (replying([{"content": "no role"}]), "Mine.reply raised "),
        (replying(5), "Mine.reply raised "),
        (holding(_lose), "Holding.play raised KeyError: 'lost'"),
        (holding(_misuse), "Holding.play raised KeyError: 'role'"),
    ],
)
def test_every_error_of_an_environment_is_named(env, error, caplog):
    with caplog.at_level(logging.WARNING):
        rollouts = play(env, ScriptedClient("good"), 2)
    for rollout in rollouts:
        assert (rollout.stop_reason, rollout.reward) == (StopReason.ENV_ERROR, None)
        assert rollout.error.startswith(error)
    assert caplog.text.count(f"scripted: {error}") == 1  # at once, and only once


@pytest.mark.parametrize("max_turns", [1, 2])
def test_an_example_that_cannot_be_rendered_costs_its_group(max_turns):
    client = ScriptedClient("good")
    rollouts = play(ScriptedEnv(max_turns=max_turns), client, 2, messages=({"content": "no role"},))
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.ENV_ERROR] * 2
    assert all(r.error.startswith("ScriptedEnv.examples (id 3) raised") for r in rollouts)
    assert client.requests == []


@pytest.mark.parametrize("env", [ScriptedEnv(), ScriptedEnv(("go on",), 2), holding(_swallow)])
def test_an_error_of_the_server_ends_the_run_and_a_failed_request_costs_its_rollout(env):
    with pytest.raises(GenerationError, match="answered 500"):
        play(env, ScriptedClient(GenerationError("vLLM answered 500")), 2)
    (rollout,) = play(env, ScriptedClient(FAILED), sampler=replace(SAMPLER, max_retries=1))
    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENGINE_ERROR, None)
    assert (rollout.error, rollout.retries) == (str(FAILED), 1)


def test_if_the_shared_request_failed_each_rollout_sends_its_own():
    rollouts = play(ScriptedEnv(), ScriptedClient(FAILED, "good", FAILED, "bad"), group_size=3)
    assert [rollout.reward for rollout in rollouts] == [2.0, None, 0.0]


def test_a_cancelled_group_is_no_error_of_the_environment():
    class Hanging(ScriptedEnv):
        async def score(self, episode):
            asyncio.current_task().cancel()
            return await super().score(await asyncio.sleep(1, episode))

    with pytest.raises(asyncio.CancelledError):
        play(Hanging(), ScriptedClient("good"))


@pytest.mark.parametrize(
    ("failures", "reward", "retries", "requests"), [(1, 2.0, 1, 2), (2, 2.0, 2, 3), (3, None, 2, 3)]
)
def test_a_rollout_with_an_environment_error_is_played_again(failures, reward, retries, requests):
    left = [failures]

    async def score(self, episode):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("the judge is busy")
        return {"good": float(episode.text == "good")}

    client = ScriptedClient("good")
    (rollout,) = play(scoring(score), client, sampler=replace(SAMPLER, max_retries=2))
    assert (rollout.reward, rollout.retries, len(client.requests)) == (reward, retries, requests)
    assert rollout.rows[0].num_completion == 5


def test_waiting_for_the_limit_of_an_environment_does_not_count_towards_the_timeout():
    inside, most = [], []

    async def score(self, episode):
        inside.append(episode)
        most.append(len(inside))
        await asyncio.sleep(50)  # of 60
        inside.remove(episode)
        return {"good": 1.0}

    env = scoring(score)
    env.max_concurrent = 2
    rollouts = play(env, ScriptedClient("good"), 12)
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 12
    assert max(most) == 2


@pytest.mark.parametrize(("max_turns", "seats", "highest"), [(1, 4, 3), (2, 4, 4), (1, 2, 3)])
def test_waiting_for_a_seat_in_vllm_does_not_count_towards_the_timeout(max_turns, seats, highest):
    most = [0, 0]

    class Counting(RendererChat):
        async def generate(self, prompt, n, seed=None):
            most[0] += n
            most[1] = max(most)
            completions = await super().generate(prompt, n, seed)
            most[0] -= n
            return completions

    chat = chat_of(ScriptedClient("good", seconds=50), kind=Counting, slots=CompletionSlots(seats))
    player = Player(SAMPLER, ScriptedEnv(max_turns=max_turns), chat)
    example = Example(id=3, env="scripted", messages=list(HI))

    async def groups():
        return await asyncio.gather(*(player.play_group(i, example, 3) for i in range(5)))

    rollouts = [rollout for group in run_virtually(groups()) for rollout in group]
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 15
    assert most[1] == highest


def test_a_slow_completion_of_many_tokens_costs_only_its_own_rollout():
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


def test_every_episode_is_closed_and_each_error_is_logged(caplog):
    closed = []

    async def score(self, episode):
        if episode.text == "bad":
            raise OSError("broken")
        await asyncio.sleep(0 if episode.text == "good" else 1e9)
        return await ScriptedEnv.score(self, episode)

    def close(self, episode):
        closed.append(episode.text)
        raise OSError("already closed")

    env = type("Closing", (ScriptedEnv,), {"score": score, "close": close})()
    good, bad, hung = play(env, ScriptedClient("good", "bad", "hang"), 3)
    assert sorted(closed) == ["bad", "good", "hang"]
    assert [r.stop_reason for r in (good, bad, hung)] == ["stop", "env_error", "timeout"]
    assert (hung.reward, hung.rows[0].num_completion) == (None, 5)  # it keeps its tokens
    assert "sampler.rollout_timeout=60 s" in hung.error
    assert good.reward == 2.0
    assert [caplog.text.count(said) for said in ("broken", "rollout_timeout=60 s")] == [1, 1]
