"""Call environment code without blocking the event loop.

A coroutine function is awaited. A plain function runs in a new daemon thread. If the function
hangs, the caller's timeout ends the wait, and the thread is abandoned. An abandoned thread does not
delay the exit of the process, but counts towards MAX_THREADS. Run untrusted code, or code that can
hang forever, in a separate process instead (envs/sandbox/sandbox.py).
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from envs.deadline import acquire

MAX_THREADS = 64  # maximum threads per event loop, including those that hang


@dataclass
class _Threads:
    """The threads of one event loop. Event loops cannot share a semaphore."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))
    hung: dict[int, str] = field(default_factory=dict)  # id of abandoned call -> function's name


_by_loop: dict[asyncio.AbstractEventLoop, _Threads] = {}


def _threads_of_loop() -> _Threads:
    loop = asyncio.get_running_loop()
    if loop not in _by_loop:
        for closed in [other for other in _by_loop if other.is_closed()]:
            del _by_loop[closed]
        _by_loop[loop] = _Threads()
    return _by_loop[loop]


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a plain function or a coroutine function, and return its result."""
    inner = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
        return await function(*args, **kwargs)
    threads = _threads_of_loop()
    if len(threads.hung) == MAX_THREADS:
        raise RuntimeError(
            f"all {MAX_THREADS} threads for environment code hang, the first one in the function "
            f"{next(iter(threads.hung.values()))}: add a timeout to this function"
        )
    await acquire(threads.free)
    # Pass the caller's context variables to the thread, as asyncio.to_thread does.
    context, name = contextvars.copy_context(), getattr(inner, "__qualname__", repr(inner))
    result = await _run_in_thread(partial(context.run, function, *args, **kwargs), name, threads)
    return await result if inspect.isawaitable(result) else result


async def _run_in_thread(work: Callable[[], Any], name: str, threads: _Threads) -> Any:
    """Run `work` in a new thread, which counts towards MAX_THREADS until `work` ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    ended = asyncio.Event()

    def finish_call(value: Any, error: BaseException | None) -> None:
        ended.set()
        threads.free.release()
        threads.hung.pop(id(future), None)
        if future.done():  # The caller has abandoned the call.
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run_work() -> None:
        value, error = None, None
        try:
            value = work()
        except StopIteration as stop:  # a future cannot raise StopIteration
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001 (the caller gets the error)
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish_call, value, error)

    threading.Thread(target=run_work, daemon=True, name=f"env {name}").start()
    try:
        return await future
    finally:
        if future.cancelled() and not ended.is_set():
            threads.hung[id(future)] = name
