"""Run the policy's Python code in a process that can compute and do nothing else.

    sandbox = Sandbox(limits)                 nothing starts yet
    await sandbox.run("x = 6 * 7")            ''     the process starts here
    await sandbox.run("x")                    '42\n'
    sandbox.close()                           the process is killed

One process per episode keeps the variables between calls. It cannot write a file, open a socket,
start a process or a thread, signal or trace another process, or read more than Python's library
(confinement.py). If code breaks a limit, its process ends and the policy gets an error message.

This protects your own machine against accidents and crude attacks of a policy. It does not stop
exploits of the kernel, because the allowed system calls are reachable and timing can be measured.
For code that strangers write, run the rollouts in a virtual machine. Without Landlock (before Linux
5.13, or switched off) nothing starts, unless the configuration accepts that Python's own hooks are
the only protection of files.
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
from envs.options import check_at_least
from envs.sandbox.interpreter import HEADER, READY
from envs.tools import ToolError

START_TIMEOUT = 120.0  # seconds
BOOT = "import sys; sys.path.append({!r}); from envs.sandbox.interpreter import main; main()"
OURS = str(Path(__file__).parents[2])
# No variable of the parent process. One thread, because numerical libraries cannot start more.
ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What code in a sandbox may use.

    Attributes:
        cpu_seconds: processor time of one call.
        call_timeout: seconds of one call on the clock, which run faster on a busy machine.
        memory_mb: address space of the process; Python itself takes about 30.
        max_output_chars: length of one answer; a longer answer loses its middle.
        site_packages: whether installed packages (sympy, numpy) can be imported.
        allow_without_landlock: whether code may run if Python's own hooks are the only protection
            against reading files.
    """

    cpu_seconds: int
    call_timeout: float
    memory_mb: int
    max_output_chars: int
    site_packages: bool
    allow_without_landlock: bool

    def __post_init__(self) -> None:
        check_at_least(1, cpu_seconds=self.cpu_seconds)
        check_at_least(64, memory_mb=self.memory_mb)
        check_at_least(2, max_output_chars=self.max_output_chars)
        if self.call_timeout <= 0:
            raise ValueError(f"call_timeout={self.call_timeout}: a call takes some seconds")


class _Lost(Exception):
    """The process ended or sent an impossible answer. The message says which."""


def try_out(limits: Limits, preload: str = "") -> None:
    """Start one sandbox and end it. Raise ValueError if this machine cannot start one."""

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
    """A confined Python interpreter. It starts at its first use."""

    def __init__(self, limits: Limits, preload: str = "") -> None:
        """`preload` is code that every new process runs first, without the time limit of a call."""
        self._limits, self._preload = limits, preload
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._watch: asyncio.TimerHandle | None = None  # the next look at the processor time
        self._spent = False  # True: killed because of its processor time

    async def run(self, code: str) -> str:
        """Return the printed text of `code`, the value of its last expression, and its exception.

        Raise ToolError if it broke a limit or ended its process; the next call starts a new one.
        Raise RuntimeError if this machine cannot start a sandbox.
        """
        try:
            return await self._ask(code)
        except BaseException:  # cancellation included, so that no late answer meets the next call
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and do not wait for its end."""
        if self._watch:
            self._watch.cancel()
        if self._socket:
            self._socket.close()
        if self._process:
            self._process.kill()
            # Waiting would block the event loop, so _reap collects the process later.
            _ending.append(self._process)
        self._process = self._socket = None
        _reap()

    async def _ask(self, code: str) -> str:
        if self._process is None:
            await self._start()
        # A random ticket, so that code cannot forge answers to later calls in advance.
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
        except OSError:  # the process has closed its end of the socket
            what = await self._cause()
        raise ToolError(
            f"the code {what}; the interpreter was restarted and its variables are gone"
        )

    def _allow_processor_time(self) -> None:
        """Kill the process when it has used cpu_seconds from now, even after its answer.

        The kernel's own limit is not enough, because it sends a signal that code can ignore.
        """
        assert self._process
        process, loop = self._process, asyncio.get_running_loop()
        until = _processor_time(process) + self._limits.cpu_seconds

        def look() -> None:
            with suppress(OSError):
                left = until - _processor_time(process)
                if left > 0:  # one thread needs at least this long to use the rest
                    self._watch = loop.call_later(left, look)
                else:
                    self._spent = True
                    process.kill()

        if self._watch:
            self._watch.cancel()
        self._watch = loop.call_later(self._limits.cpu_seconds, look)

    async def _cause(self) -> str:
        """Return why the process has ended, or is about to end."""
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
        options = {
            "fd": child_end.fileno(),
            "root": OURS,
            "packages": sorted(paths) if limits.site_packages else [],
            "memory_mb": limits.memory_mb,
            "max_output_chars": limits.max_output_chars,
            "allow_without_landlock": limits.allow_without_landlock,
        }
        # Not in another thread, because the process dies with the thread that starts it.
        with child_end:
            python = [sys.executable, "-ISB", "-X", "utf8", "-c", BOOT.format(OURS)]
            self._process = subprocess.Popen(
                [*python, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # so that Ctrl-C at the terminal does not reach it
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
        """Return the answer with this ticket. Raise _Lost if the ticket or the length is wrong."""
        length, answered = HEADER.unpack(await self._read(HEADER.size))
        # At most 4 bytes per character, and 100 characters to say what was left out.
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
    """Return the processor time of a process. Raise OSError if it has ended."""
    return time.clock_gettime((~process.pid << 3) | 2)  # the kernel's id of its clock


_ending: list[subprocess.Popen[bytes]] = []  # killed, and not yet collected


def _reap() -> None:
    _ending[:] = [process for process in _ending if process.poll() is None]
