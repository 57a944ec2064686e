"""Child processes that end when the supervisor ends or is killed.

Each child has its own process group and log file. Three mechanisms end children. The context
manager of a child sends TERM and later KILL to its group. If the supervisor dies, the kernel kills
each child (parent-death signal), but not the child's own children, such as vLLM's workers. So the
reaper, a small process, ends the groups of all children when its pipe from the supervisor closes.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1
_GRACE_S = 1.0
_TAIL_BYTES = 1 << 18
_LIBC = ctypes.CDLL(None)  # loaded before any fork, because loading in a forked child may deadlock


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module. -P keeps the working folder out of sys.path."""
    return [sys.executable, "-P", "-m", name, *arguments]


def last_lines(log: Path, count: int = 20) -> str:
    """Return the last lines of a log file. Of each progress bar, return only the last state."""
    if not log.exists():
        return "(no log yet)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").rstrip().split("\n")
    return "\n".join(line.rstrip("\r").split("\r")[-1] for line in lines[-count:])


def _die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this child when its parent dies.

    This function runs between fork and exec, so it must not acquire a lock.
    """
    # A scheduler may send USR2 to all processes of a job. Ignore USR2, which would end vLLM.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # The kernel also sends KILL when the thread that called fork ends, so only the main thread may
    # start children.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the prctl call
        os._exit(1)


def group_alive(group: int) -> bool:
    # Do not use killpg(group, 0), because it also finds zombies, which may never be reaped.
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            # The process name may contain spaces and parentheses, so split after its last ")".
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


def describe_exit(status: int | None) -> str:
    """Describe an exit status. After KILL, name the likely cause, which is not in the log."""
    killed = " (killed, perhaps because memory ran out: docs/troubleshooting.md, memory)"
    return f"ended with status {status}{killed if status == -signal.SIGKILL else ''}"


def end_groups(groups: Sequence[int], grace_s: float = _GRACE_S) -> None:
    """Send TERM to the process groups, wait, and send KILL to the groups that are still alive."""
    deadline = time.monotonic() + grace_s
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sig)
        while time.monotonic() < deadline and any(group_alive(group) for group in groups):
            time.sleep(0.05)
        deadline += 1.0  # after KILL, the kernel may need a second to free the processes' memory


class Reaper:
    """The handle of the reaper, which ends the children's process groups if this process dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        # Skip site-packages (-S) and PYTHON* variables (-E), which could break or slow the reaper.
        # Other children do not inherit the pipe, so it closes when this process ends.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("reaper.py"))],
            stdin=subprocess.PIPE,
            bufsize=0,  # because a killed supervisor would lose the content of a buffer
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach the reaper
        )
        for group in self._groups:
            self._send(f"+{group}")

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reaper was killed; `ensure_alive` replaces it
            self._process.stdin.write(f"{line}\n".encode())

    def register(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}")

    def unregister(self, group: int) -> None:
        """Unregister an ended process group, because the kernel may reuse its number."""
        self._groups.discard(group)
        self._send(f"-{group}")

    def ensure_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=_GRACE_S + 5)


@dataclass(frozen=True)
class Start:
    """How to start a process."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ends_on_term: bool = True  # whether the signal TERM ends the process; if not, `end` sends KILL
    in_terminal: bool = False  # whether it uses the supervisor's terminal; `log` then stays empty


class Child:
    """One child process with its descendants: a process group with a log file."""

    def __init__(self, start: Start, reaper: Reaper) -> None:
        self.name, self.log = start.name, start.log
        self._options, self._reaper = start, reaper
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            in_terminal = self._options.in_terminal
            stdin, output = (None, None) if in_terminal else (subprocess.DEVNULL, log)
            self._process = subprocess.Popen(
                self._options.command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._options.env},
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, os.getpid()),
            )
        self._reaper.register(self._process.pid)

    @property
    def group(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def tail(self) -> str:
        return last_lines(self.log)

    def kill(self) -> None:
        """End the process group as `end` does, but keep `returncode`."""
        end_together([self])

    def end(self) -> None:
        if self._process is None:
            return
        end_together([self])
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._reaper.unregister(self._process.pid)
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def end_together(children: Sequence[Child]) -> None:
    """End the process groups of all children in parallel."""
    for child in children:
        if child._process is not None and not child._options.ends_on_term:
            child._process.kill()
    end_groups([child.group for child in children if child.group is not None])
