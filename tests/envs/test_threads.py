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
