"""How many blocking functions of environments run at once."""

import asyncio
import threading
import time

from envs import threads


def test_no_more_threads_run_at_once_than_there_are_places(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 3)
    running, most, lock = 0, 0, threading.Lock()

    def block() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    async def many() -> None:
        await asyncio.gather(*(threads.call(block) for _ in range(12)))

    asyncio.run(many())
    assert (most, running) == (3, 0)
