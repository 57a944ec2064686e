"""Runs environment code that may block without stalling the loop that plays thousands of episodes.

A coroutine function is awaited; a plain function runs in a thread of its own. Threads are daemons
and are not pooled: one that hangs is abandoned by its caller's timeout, and neither holds up others
nor the end of the process. Code that can hang for ever, or must not be trusted, belongs in a
process (envs/sandbox/sandbox.py).
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

MAX_THREADS = 64  # that run at once; later calls wait for a place


class _Places:
    """One semaphore per event loop, since a semaphore belongs to the loop that first waits."""

    def __init__(self) -> None:
        self._of: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._of:
            self._of = {known: place for known, place in self._of.items() if not known.is_closed()}
            self._of[loop] = asyncio.Semaphore(MAX_THREADS)
        return self._of[loop]


_places = _Places()


async def call(function: Callable[..., Any], *args: Any, **knobs: Any) -> Any:
    """Return what `function` returns, coroutine function or not; raises what it raises."""
    inner = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
        return await function(*args, **knobs)
    async with _places.here():
        context = contextvars.copy_context()
        result = await _in_thread(partial(context.run, function, *args, **knobs))
    return await result if inspect.isawaitable(result) else result


async def _in_thread(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # the caller has given up
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except StopIteration as stop:  # a future does not take it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001 (the caller gets it)
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name=f"env {work}").start()
    return await future
