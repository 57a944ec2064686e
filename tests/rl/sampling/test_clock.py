"""The clock of a rollout: it stands still while the rollout waits, and counts all other time."""

import asyncio
from types import SimpleNamespace

import pytest

from rl.sampling import clock as module
from rl.sampling.clock import Clock, CompletionSlots
from tests.support.virtual_time import run_virtually


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
