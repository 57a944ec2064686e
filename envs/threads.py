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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

MAX_THREADS = 64  # that run at once, those that hang included; later calls wait for a place


@dataclass
class _Places:
    """Those of one event loop, since a semaphore belongs to the loop that first waits."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))
    hung: dict[int, str] = field(default_factory=dict)  # calls that nobody waits for any more


_of: dict[asyncio.AbstractEventLoop, _Places] = {}


def _places() -> _Places:
    loop = asyncio.get_running_loop()
    if loop not in _of:
        for closed in [known for known in _of if known.is_closed()]:
            del _of[closed]
        _of[loop] = _Places()
    return _of[loop]


async def call(function: Callable[..., Any], *args: Any, **knobs: Any) -> Any:
    """Return what `function` returns, coroutine function or not; raises what it raises.

    Raises:
        RuntimeError: every thread hangs in a call that was given up.

    """
    inner = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
        return await function(*args, **knobs)
    places = _places()
    if len(places.hung) == MAX_THREADS:
        raise RuntimeError(
            f"all {MAX_THREADS} threads for environment code hang, the first in "
            f"{next(iter(places.hung.values()))}: give what it waits for a timeout"
        )
    await places.free.acquire()
    # The thread sees the caller's context variables, as with asyncio.to_thread.
    context, name = contextvars.copy_context(), getattr(inner, "__qualname__", repr(inner))
    result = await _in_thread(partial(context.run, function, *args, **knobs), name, places)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(work: Callable[[], Any], name: str, places: _Places) -> Any:
    """Run it in a thread, which holds its place until it ends, not until nobody waits."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        places.free.release()
        places.hung.pop(id(future), None)
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
            # Futures are not thread-safe: only their loop may set them.
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name=f"env {name}").start()
    try:
        return await future
    finally:
        if future.cancelled():
            places.hung[id(future)] = name
