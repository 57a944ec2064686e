"""Functions for jobs that run in a separate process, not in the sweep's own process."""

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


@cache  # start only one thread for all jobs of this process
def end_with_process(host: str, pid: int) -> None:
    """Kill this process, a launcher's worker, as soon as the sweep's process `pid` has ended.

    Otherwise workers of a killed sweep would continue with its jobs. A worker's reaper ends the
    worker's run (rl/runtime/child.py). Do nothing if the sweep's process is on another host.
    """
    if host != socket.gethostname():
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # some kernels and containers have no pidfd
        return
    else:
        Thread(target=_kill_when_readable, args=(descriptor,), daemon=True).start()


def _kill_when_readable(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def redirect_output_to(path: Path) -> Iterator[None]:
    """Append the output of this process and of its children to a file while the block runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(sys.stdout, io.TextIOWrapper):  # line buffering keeps stdout and stderr in order
        sys.stdout.reconfigure(line_buffering=True)
    before = {number: os.dup(number) for number in (1, 2)}
    with path.open("ab") as file:
        for number in before:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in before.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
