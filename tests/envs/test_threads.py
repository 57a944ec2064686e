"""Environment code in threads: never more threads than MAX_THREADS, hung threads included."""

import asyncio
import threading
import time

import pytest

from envs import threads


def test_a_thread_that_hangs_keeps_its_place_until_it_ends(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 2)
    release, running, most = threading.Event(), [0], [0]

    def hang() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        release.wait(30)
        running[0] -= 1

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await threads.call(hang)

    async def main() -> str:
        await given_up()
        assert await threads.call(lambda: "alive") == "alive"  # one place is left
        await asyncio.gather(*(given_up() for _ in range(5)))
        with pytest.raises(
            RuntimeError, match=r"all 2 threads .* hang, the first one in .*hang: add"
        ):
            await threads.call(time.monotonic)
        release.set()
        while running[0]:
            await asyncio.sleep(0.01)
        return await threads.call(lambda: "alive again")

    assert asyncio.run(main()) == "alive again"
    assert most[0] == 2


def test_a_call_that_ends_just_before_its_caller_gives_up_does_not_count_as_hung(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 1)
    release = threading.Event()

    async def main() -> str:
        task = asyncio.create_task(threads.call(release.wait, 30))
        await asyncio.sleep(0.05)
        (thread,) = [t for t in threading.enumerate() if t.name.startswith("env ")]
        release.set()
        thread.join()  # blocks the loop, so that the result and the cancellation come together
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await threads.call(lambda: "alive")

    assert asyncio.run(main()) == "alive"
