"""Child processes that never outlive us.

Each child gets its own process group and a log file. Three things end it: leaving the context
manager (TERM, wait, KILL, to the whole group); our death, through the kernel's parent-death
signal; and the reaper, a tiny process holding the other end of a pipe, which sees that pipe close
whatever killed us and then ends every group we told it about. vLLM needs the reaper: killing its
parent process leaves its workers running for ever.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1
_GRACE_S = 1.0
_TAIL_BYTES = 1 << 18
_LIBC = ctypes.CDLL(None)  # loaded before any fork, for loading takes locks


def last_lines(log: Path, count: int = 20) -> str:
    """Return the end of a log file; of a progress bar, its last state."""
    if not log.exists():
        return "(no log yet)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").rstrip().split("\n")
    return "\n".join(line.rstrip("\r").split("\r")[-1] for line in lines[-count:])


def _die_with_parent(parent: int) -> None:
    """Run in the child, between fork and exec: nothing here may take a lock."""
    # A scheduler's notice: the supervisor acts on it, and vLLM would die of it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Sent when the thread that forked ends, whatever the process does: fork in the main one.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def group_alive(group: int) -> bool:
    """True while a process of the group is left that is not a zombie."""
    # killpg(group, 0) counts zombies, and in a container nobody may ever collect them.
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            # Behind the name in parentheses, which may hold spaces and parentheses itself.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


def ending(status: int | None) -> str:
    """What became of a process; of a KILL where it may come from, for no log tells that."""
    killed = " (killed, perhaps by the kernel for want of memory)"
    return f"ended with status {status}{killed if status == -signal.SIGKILL else ''}"


def end_groups(groups: Sequence[int], grace_s: float = _GRACE_S) -> None:
    """TERM the process groups, wait, KILL what is left."""
    deadline = time.monotonic() + grace_s
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sig)
        while time.monotonic() < deadline and any(group_alive(group) for group in groups):
            time.sleep(0.05)
        deadline += 1.0  # after KILL: what holds much memory takes a moment to go


class Reaper:
    """Outlives us just long enough to end the process groups that we started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        # No site-packages and no PYTHON* variables: up at once, whatever is broken there. Its pipe
        # ends with us alone, for children inherit no descriptors.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("reaper.py"))],
            stdin=subprocess.PIPE,
            bufsize=0,  # nothing may be left unwritten when it is killed
            start_new_session=True,  # Ctrl-C goes to the whole group of a terminal, not to this
        )
        for group in self._groups:
            self._tell(f"+{group}")

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed; `ensure_alive` starts another
            self._process.stdin.write(f"{line}\n".encode())

    def watch(self, group: int) -> None:
        """End this process group if we die."""
        self._groups.add(group)
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group has ended; its number may soon belong to somebody else."""
        self._groups.discard(group)
        self._tell(f"-{group}")

    def ensure_alive(self) -> None:
        """Start another reaper if somebody killed ours."""
        if self._process is not None and self._process.poll() is not None:
            self._start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=_GRACE_S + 5)


class Child:
    """One child process and everything it starts: a process group with a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        reaper: Reaper,
        env: Mapping[str, str] | None = None,
        ends_on_term: bool = True,
    ) -> None:
        """`ends_on_term`: else its first TERM counts as a scheduler's, so at the end it is killed.

        What it has started gets its TERM nevertheless.
        """
        self.ends_on_term = ends_on_term
        self.name, self.command, self.log = name, list(command), log
        self._reaper, self.env = reaper, dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, os.getpid()),
            )
        self._reaper.watch(self._process.pid)

    @property
    def group(self) -> int | None:
        """Process group, None before the start and after the end."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while running; negative for a signal."""
        return None if self._process is None else self._process.poll()

    def tail(self) -> str:
        """The end of its log."""
        return last_lines(self.log)

    def kill(self) -> None:
        """End the whole group; its exit status can still be asked for."""
        end_together([self])

    def end(self) -> None:
        """End the whole group. Safe to call twice."""
        if self._process is None:
            return
        end_together([self])
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._reaper.forget(self._process.pid)
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def kill_leader(self) -> None:
        """Kill the process itself."""
        if self._process is not None:
            self._process.kill()


def end_together(children: Sequence[Child]) -> None:
    """End the groups of all of them within one grace period."""
    for child in children:
        if not child.ends_on_term:
            child.kill_leader()
    end_groups([child.group for child in children if child.group is not None])
