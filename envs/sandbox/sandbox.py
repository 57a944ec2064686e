"""Runs the policy's Python code in a process of its own that can compute and do nothing else.

    sandbox = Sandbox(limits)                 nothing starts yet
    await sandbox.run("x = 6 * 7")            ''     the process starts here
    await sandbox.run("x")                    '42\n'
    sandbox.close()                           the process is killed

One process per episode keeps the variables between calls. It may not write any file (so there is no
temporary folder either), open a socket, start a process or a thread, signal or trace another, or
read more than Python's library; confinement.py says how. Code that breaks a limit costs its
own process, and the policy is told.

This guards against a policy's accidents and crude attacks on a machine that is ours. It is no
boundary for code that brings exploits: the kernel's remaining calls are reachable and timing can be
measured. Where the kernel lacks Landlock (before Linux 5.13, or switched off) nothing starts,
unless it is accepted that Python alone guards files. For code that strangers write, run the
rollouts in a virtual machine of their own.
"""

import asyncio
import json
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envs import threads
from envs.sandbox.interpreter import HEADER, READY
from envs.tools import ToolError

START_TIMEOUT = 120.0  # seconds until a new process must be ready
BOOT = "import sys; sys.path.append({!r}); from envs.sandbox.interpreter import main; main()"
OURS = str(Path(__file__).parents[2])
# Nothing of our own environment; numerical libraries would start threads, which fail here.
ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What code in a sandbox may use.

    Attributes:
        cpu_seconds: processor time of one call.
        call_timeout: seconds of one call on the clock; on a busy machine code waits for its turn.
        memory_mb: address space of the process; Python itself takes about 30.
        max_output_chars: of the answer to one call; what is longer loses its middle.
        site_packages: whether installed packages (sympy, numpy) can be imported.
        allow_without_landlock: whether code may run where nothing but Python's own hooks keeps it
            from reading files.

    """

    cpu_seconds: int
    call_timeout: float
    memory_mb: int
    max_output_chars: int
    site_packages: bool
    allow_without_landlock: bool

    def __post_init__(self) -> None:
        for name, least in (("cpu_seconds", 1), ("memory_mb", 64), ("max_output_chars", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: a sandbox needs at least {least}")
        if self.call_timeout <= 0:
            raise ValueError(f"call_timeout={self.call_timeout}: a call takes some seconds")


class _Lost(Exception):
    """The process ended, or answered as it never does; the message says which."""


def try_out(limits: Limits, preload: str = "") -> None:
    """Start one sandbox and end it. ValueError, for the user, where this machine has none."""

    async def start() -> None:
        sandbox = Sandbox(limits, preload)
        try:
            await sandbox.run("")
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        finally:
            sandbox.close()

    asyncio.run(start())


class Sandbox:
    """A Python interpreter behind bars. Starts when it is first used."""

    def __init__(self, limits: Limits, preload: str = "") -> None:
        """`preload`: code that every fresh process runs first, at leisure."""
        self._limits, self._preload = limits, preload
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._watch: asyncio.TimerHandle | None = None  # of the process's clock
        self._spent = False  # its processor time, so we killed it

    async def run(self, code: str) -> str:
        """Return what `code` prints, the value of its last expression, and its exception.

        Raises:
            ToolError: it broke a limit or its interpreter; the next call starts with a fresh one.
            RuntimeError: no sandbox can be started on this machine.

        """
        try:
            return await self._ask(code)
        except BaseException:  # cancelled, too: the late answer would meet the next question
            self.close()
            raise

    def close(self) -> None:
        """Kill the process, without waiting for its end."""
        if self._watch:
            self._watch.cancel()
        if self._socket:
            self._socket.close()
        if self._process:
            self._process.kill()
            # To wait for its end would hold up the loop: it is collected later.
            _ending.append(self._process)
        self._process = self._socket = None
        _reap()

    async def _ask(self, code: str) -> str:
        if self._process is None:
            await self._start()
        # Code could write answers to later calls in advance: it cannot know their tickets.
        ticket = secrets.token_bytes(8)
        try:
            async with asyncio.timeout(self._limits.call_timeout):
                self._allow_processor_time()
                await self._send(ticket, code)
                return await self._receive(ticket)
        except TimeoutError:
            what = f"took longer than {self._limits.call_timeout:g} s"
        except _Lost as lost:
            what = str(lost)
        except OSError:  # it has closed its end
            what = await self._cause()
        raise ToolError(
            f"the code {what}; the interpreter was restarted and its variables are gone"
        )

    def _allow_processor_time(self) -> None:
        """Kill the process when it has used cpu_seconds from now, be it after its answer.

        The kernel's own limit sends a signal, which code can ignore.
        """
        assert self._process
        process, loop = self._process, asyncio.get_running_loop()
        until = _processor_time(process) + self._limits.cpu_seconds

        def look() -> None:
            with suppress(OSError):
                left = until - _processor_time(process)
                if left > 0:  # it has one thread: it cannot spend that any sooner
                    self._watch = loop.call_later(left, look)
                else:
                    self._spent = True
                    process.kill()

        if self._watch:
            self._watch.cancel()
        self._watch = loop.call_later(self._limits.cpu_seconds, look)

    async def _cause(self) -> str:
        """Why the process has ended, or is about to."""
        assert self._process
        self._process.kill()
        status = await threads.call(self._process.wait)
        if self._spent:
            return f"used up {self._limits.cpu_seconds} s of processor time"
        if status < 0 and status != -signal.SIGKILL:
            return f"crashed the interpreter ({signal.Signals(-status).name})"
        return "ended the interpreter"

    async def _start(self) -> None:
        _reap()
        self._spent = False
        limits = self._limits
        self._socket, child_end = socket.socketpair()
        self._socket.setblocking(False)
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        knobs = {
            "fd": child_end.fileno(),
            "ours": OURS,
            "packages": sorted(paths) if limits.site_packages else [],
            "memory_mb": limits.memory_mb,
            "max_output_chars": limits.max_output_chars,
            "allow_without_landlock": limits.allow_without_landlock,
        }
        # Here and not in a thread: the process dies with the thread that starts it.
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-ISB", "-X", "utf8", "-c", BOOT.format(OURS), json.dumps(knobs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal is for the run to handle
            )
        try:
            async with asyncio.timeout(START_TIMEOUT):
                problem = await self._receive(READY)
                if self._preload and not problem:
                    await self._send(READY, self._preload)
                    problem = await self._receive(READY)
        except (TimeoutError, _Lost, OSError) as error:
            problem = f"it did not get ready within {START_TIMEOUT:g} s ({error!r})"
        if problem:
            raise RuntimeError(f"no sandbox for Python code on this machine: {problem}")

    async def _send(self, ticket: bytes, text: str) -> None:
        content = text.encode(errors="backslashreplace")
        assert self._socket
        message = HEADER.pack(len(content), ticket) + content
        await asyncio.get_running_loop().sock_sendall(self._socket, message)

    async def _receive(self, ticket: bytes) -> str:
        """The answer to a message; _Lost where it is another's, or longer than it can be."""
        length, answered = HEADER.unpack(await self._read(HEADER.size))
        # At most four bytes a character, and 100 characters for what was left out.
        if answered != ticket or length > 4 * (self._limits.max_output_chars + 100):
            raise _Lost("answered in the interpreter's place")
        return (await self._read(length)).decode(errors="replace")

    async def _read(self, count: int) -> bytes:
        assert self._socket
        data = b""
        while len(data) < count:
            part = await asyncio.get_running_loop().sock_recv(self._socket, count - len(data))
            if not part:
                raise ConnectionResetError("the process has closed its end")
            data += part
        return data


def _processor_time(process: subprocess.Popen[bytes]) -> float:
    """Seconds that it has used. OSError where it has ended."""
    return time.clock_gettime((~process.pid << 3) | 2)  # the kernel's name of its clock


_ending: list[subprocess.Popen[bytes]] = []  # killed, not yet collected


def _reap() -> None:
    _ending[:] = [process for process in _ending if process.poll() is None]
