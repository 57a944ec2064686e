"""Which time counts for a rollout, and code of an environment that blocks all rollouts."""

import asyncio
import re
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from envs.deadline import WAITING, Deadline, acquire
from envs.episode import Example
from envs.user_code import ROOT
from rl.sampling import clock as module
from rl.sampling.clock import Clock, CompletionSlots
from rl.sampling.player import Player
from rl.sampling.watchdog import Watchdog
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, chat_of, scoring
from tests.support.virtual_time import run_virtually


class Noting(Watchdog):
    """Note after how many seconds it reports."""

    def _report(self, seconds):
        reports.append(seconds)
        super()._report(seconds)


reports = []


def played(block):
    """Return two rollouts, of which `block` delays the score of the first, and the reports."""

    async def score(self, episode):
        if episode.text == "bad":
            block()
        return await ScriptedEnv.score(self, episode)

    async def play():
        chat, example = chat_of(ScriptedClient("bad", "good")), Example(3, "scripted", list(HI))
        with Noting(sentences.append, patience=0.2, interval=0.05) as watchdog:
            return await Player(SAMPLER, scoring(score), chat, watchdog).play_group(0, example, 2)

    sentences = []
    reports.clear()
    return asyncio.run(play()), sentences


def test_a_score_that_blocks_is_named_with_its_line_and_counted_and_the_run_goes_on():
    (bad, good), sentences = played(lambda: time.sleep(1))
    assert (good.reward, bad.reward) == (2.0, 0.0)
    assert bad.blocked_time == reports[-1] > 0.2
    assert all(later > 2 * earlier for earlier, later in pairwise(reports))
    assert good.blocked_time == 0.0
    message = r"all rollouts have been blocked for .* s by .*\(test_watchdog\.py:\d+\)"
    assert re.match(message, sentences[0])

    # A library in between does not hide the line of the environment.
    def block():
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)

    _, sentences = played(block)
    assert "block (test_watchdog.py:" in sentences[0]


def test_code_of_rl_that_blocks_is_not_called_the_users():
    async def blocked():
        sentences = []
        with Watchdog(sentences.append, patience=0.2, interval=0.05) as watchdog:
            # The compiled frame belongs to a file of rl/, as if that file blocked.
            code = compile("import time\ntime.sleep(1)", str(ROOT / "rl/records.py"), "exec")
            asyncio.get_running_loop().call_soon(exec, code)
            await asyncio.sleep(0.01)
            return sentences, watchdog.pop_blocked_seconds()

    assert asyncio.run(blocked()) == ([], 0.0)


def test_a_loop_that_is_alive_is_left_alone():
    async def alive():
        sentences = []
        with Watchdog(sentences.append, patience=1.0, interval=0.05) as watchdog:
            for _ in range(30):
                await asyncio.sleep(0.01)
            task = asyncio.current_task()
            watchdog._blocked[task] = 2.0  # read once, by the rollout that blocked
            assert [watchdog.pop_blocked_seconds() for _ in range(2)] == [2.0, 0.0]
        shipped = Watchdog(sentences.append)
        assert (shipped._patience, shipped._interval) == (3.0, 0.5)
        return sentences

    assert asyncio.run(alive()) == []


async def waits(clock: Clock, seconds: float, *, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    with clock.pause():
        await asyncio.sleep(seconds)


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.0), (0.0, 1.0), (3.0, 3.5)])
def test_the_clock_goes_on_when_the_last_of_several_waiting_turns_has_its_answer(first, second):
    async def left() -> float:
        clock = Clock(10.0)
        async with clock.run():
            await asyncio.gather(waits(clock, 3.0, after=first), waits(clock, 8.0, after=second))
            await asyncio.sleep(4.0)
        return clock.left

    assert run_virtually(left()) == pytest.approx(10.0 - first - 4.0)


def test_a_rollout_times_out_only_by_the_time_in_which_no_turn_waits():
    async def timed_out_at() -> float:
        clock = Clock(2.0)

        async def episode() -> None:
            async with clock.run():
                await asyncio.gather(waits(clock, 30.0), waits(clock, 50.0))
                await asyncio.sleep(60.0)

        with pytest.raises(TimeoutError):
            await episode()
        assert clock.left == 0
        return asyncio.get_running_loop().time()

    assert run_virtually(timed_out_at()) == pytest.approx(52.0)


def test_a_wait_pauses_the_inner_and_the_outer_deadline():
    async def left() -> tuple[float, float]:
        outer, inner = Clock(10.0), Deadline(5.0)
        async with outer.run(), inner.run():
            await acquire(asyncio.Semaphore(1))
            with WAITING.get()():
                await asyncio.sleep(30.0)
            await asyncio.sleep(4.0)
        return outer.left, inner.left

    assert run_virtually(left()) == pytest.approx((6.0, 1.0))


def test_the_remaining_time_is_that_of_all_blocks():
    async def left() -> float:
        clock = Clock(10.0)
        for seconds in (1.0, 2.0):
            async with clock.run():
                await asyncio.sleep(seconds)
            await asyncio.sleep(5.0)  # between two blocks the clock stands still
        return clock.left

    assert run_virtually(left()) == pytest.approx(7.0)


def test_the_time_of_the_server_is_that_of_all_requests_without_their_waits(monkeypatch):
    now = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(module, "time", now)

    async def engine_time():
        clock, slots = Clock(10.0), CompletionSlots(1)
        async with clock.run(), slots.hold(1):
            requests = [asyncio.create_task(request(clock, slots, s)) for s in (2, 3)]
            await asyncio.sleep(100)
        await asyncio.gather(*requests)
        return clock.engine_time

    async def request(clock, slots, seconds):
        async with clock.hold_slots(slots):
            await asyncio.sleep(seconds)

    assert run_virtually(engine_time()) == pytest.approx(5.0)
