"""What a process does that runs a job for the sweep's own process."""

import io
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread


def this_process() -> dict[str, str | int]:
    """What others know this process by."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


@cache  # one thread for all the jobs of this process
def end_with(host: str, pid: int) -> None:
    """End this process when that one has ended, however it did; the reaper ends what we started.

    Launchers leave their workers alone when they are killed, and those would go on with the jobs.
    """
    if host != socket.gethostname():
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # a kernel that has no such thing
        return
    else:
        Thread(target=_end_when_readable, args=(descriptor,), daemon=True).start()


def _end_when_readable(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append what this process prints, and what it starts, to a file while the block lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    if isinstance(sys.stdout, io.TextIOWrapper):  # in the order in which it is said
        sys.stdout.reconfigure(line_buffering=True)
    before = {number: os.dup(number) for number in (1, 2)}
    with path.open("ab") as file:
        for number in before:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        _flush()
        for number, descriptor in before.items():
            os.dup2(descriptor, number)
            os.close(descriptor)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
