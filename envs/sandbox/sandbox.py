r"""Run the policy's Python code in a process that can only compute.

    sandbox = Sandbox(limits)                 nothing starts yet
    await sandbox.run("x = 6 * 7")            ''     the process starts here
    await sandbox.run("x")                    '42\n'
    sandbox.close()                           the process is killed

The process keeps its variables between calls, so code from two episodes must not share a sandbox.
confinement.py limits what the process can do. If code exceeds a time limit, its process ends and
the policy gets an error message.

The sandbox protects your machine against accidents and simple attacks by a policy. It does not stop
exploits of the kernel or timing attacks. For code from untrusted people, run the rollouts in a
virtual machine.
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
from typing import Annotated

from msgspec import Meta

from envs import threads
from envs.options import PositiveFloat, PositiveInt
from envs.sandbox.interpreter import HEADER, READY
from envs.tools import ToolError

MemoryMb = Annotated[int, Meta(ge=64)]
START_TIMEOUT = 120.0  # maximum seconds for the start of a process
BOOT = "import sys; sys.path.append({!r}); from envs.sandbox.interpreter import main; main()"
PROJECT = str(Path(__file__).parents[2])
# The process has only these environment variables. The last two tell libraries to start no
# threads, because the sandbox forbids threads.
ENVIRONMENT = {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of code in a sandbox. conf/env/math-python.yaml explains the options."""

    cpu_seconds: PositiveInt
    call_timeout: PositiveFloat
    memory_mb: MemoryMb
    max_output_chars: Annotated[int, Meta(ge=2)]
    site_packages: bool
    allow_without_landlock: bool


class _InvalidAnswer(Exception):
    """The error raised if code has forged an answer. Its message follows the words "the code"."""


def check_sandbox(limits: Limits, preload: str = "") -> None:
    """Start and close one sandbox. Raise ValueError if this machine cannot start a sandbox."""

    async def start_once() -> None:
        sandbox = Sandbox(limits, preload)
        try:
            await sandbox.run("")
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        finally:
            sandbox.close()

    asyncio.run(start_once())


class Sandbox:
    """A confined Python interpreter. Its process starts at the first use."""

    def __init__(self, limits: Limits, preload: str = "") -> None:
        """Create a sandbox. Each new process runs the code `preload` before the first call."""
        self._limits, self._preload = limits, preload
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._cpu_timer: asyncio.TimerHandle | None = None  # next check of the processor time
        self._exceeded_cpu_time = False  # whether the code used too much processor time

    async def run(self, code: str) -> str:
        """Run `code`. Return its output, its last expression's value and any traceback.

        Raise ToolError if the code exceeds a time limit or ends its process. The next call then
        starts a new process. Raise RuntimeError if this machine cannot start a sandbox.
        """
        try:
            return await self._ask_interpreter(code)
        except BaseException:  # otherwise the next call could read the answer to this call
            self.close()
            raise

    def close(self) -> None:
        if self._cpu_timer:
            self._cpu_timer.cancel()
        if self._socket:
            self._socket.close()
        if self._process:
            self._process.kill()
            # `_collect_killed` reads the exit status later. To wait here would block the loop.
            _killed.append(self._process)
        self._process = self._socket = None
        _collect_killed()

    async def _ask_interpreter(self, code: str) -> str:
        if self._process is None:
            await self._start()
        # Answers must repeat this random ticket, so that code cannot forge answers to later calls.
        ticket = secrets.token_bytes(8)
        try:
            async with asyncio.timeout(self._limits.call_timeout):
                self._limit_processor_time()
                await self._send(ticket, code)
                return await self._receive_answer(ticket)
        except TimeoutError:
            problem = f"took longer than {self._limits.call_timeout:g} s"
        except _InvalidAnswer as forged:
            problem = str(forged)
        except OSError:  # The process has ended, or has closed its socket.
            problem = await self._kill_and_explain()
        raise ToolError(
            f"the code {problem}; the interpreter was restarted and its variables are gone"
        )

    def _limit_processor_time(self) -> None:
        """Kill the process when it has used `cpu_seconds` of processor time since this call began.

        The limit also applies after the answer, because code can forge an answer and continue. The
        kernel's own limit (RLIMIT_CPU) counts all calls of the process, so it is not used.
        """
        assert self._process
        process, loop = self._process, asyncio.get_running_loop()
        end = _processor_time(process) + self._limits.cpu_seconds

        def check_time() -> None:
            with suppress(OSError):
                remaining = end - _processor_time(process)
                if remaining > 0:  # seconds; one thread needs at least this long to use them
                    self._cpu_timer = loop.call_later(remaining, check_time)
                else:
                    self._exceeded_cpu_time = True
                    process.kill()

        if self._cpu_timer:
            self._cpu_timer.cancel()
        self._cpu_timer = loop.call_later(self._limits.cpu_seconds, check_time)

    async def _kill_and_explain(self) -> str:
        """Kill the process. Return the words that follow "the code" in the ToolError."""
        assert self._process
        self._process.kill()
        status = await threads.call(self._process.wait)
        if self._exceeded_cpu_time:
            return f"used up {self._limits.cpu_seconds} s of processor time"
        if status < 0 and status != -signal.SIGKILL:
            return f"crashed the interpreter ({signal.Signals(-status).name})"
        return "ended the interpreter"

    async def _start(self) -> None:
        _collect_killed()
        self._exceeded_cpu_time = False
        limits = self._limits
        self._socket, child_end = socket.socketpair()
        self._socket.setblocking(False)
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        options = {
            "fd": child_end.fileno(),
            "root": PROJECT,
            "max_output_chars": limits.max_output_chars,
            "confine": {
                "packages": sorted(paths) if limits.site_packages else [],
                "memory_mb": limits.memory_mb,
                "allow_without_landlock": limits.allow_without_landlock,
            },
        }
        # The kernel kills the process when the thread that calls Popen ends, so use no thread pool.
        with child_end:
            python = [sys.executable, "-ISB", "-X", "utf8", "-c", BOOT.format(PROJECT)]
            self._process = subprocess.Popen(
                [*python, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal must not stop the process.
            )
        try:
            async with asyncio.timeout(START_TIMEOUT):
                problem = await self._receive_answer(READY)
                if self._preload and not problem:
                    await self._send(READY, self._preload)
                    problem = await self._receive_answer(READY)
        except (TimeoutError, _InvalidAnswer, OSError) as error:
            problem = f"its process failed, or took longer than {START_TIMEOUT:g} s ({error!r})"
        if problem:
            raise RuntimeError(f"this machine cannot start a sandbox for Python code: {problem}")

    async def _send(self, ticket: bytes, text: str) -> None:
        content = text.encode(errors="backslashreplace")
        assert self._socket
        message = HEADER.pack(len(content), ticket) + content
        await asyncio.get_running_loop().sock_sendall(self._socket, message)

    async def _receive_answer(self, ticket: bytes) -> str:
        length, answered = HEADER.unpack(await self._read_bytes(HEADER.size))
        # The interpreter answers with at most `max_output_chars` characters, and at most 100 more
        # for the note about left-out text. A character has at most 6 bytes (an escaped surrogate).
        if answered != ticket or length > 6 * (self._limits.max_output_chars + 100):
            raise _InvalidAnswer("forged the interpreter's answer")
        return (await self._read_bytes(length)).decode(errors="replace")

    async def _read_bytes(self, count: int) -> bytes:
        assert self._socket
        data = b""
        while len(data) < count:
            chunk = await asyncio.get_running_loop().sock_recv(self._socket, count - len(data))
            if not chunk:
                raise ConnectionResetError("the process has closed its socket")
            data += chunk
        return data


def _processor_time(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process. Raise OSError if the process has ended."""
    return time.clock_gettime((~process.pid << 3) | 2)  # Linux's id of the process's CPU clock


_killed: list[subprocess.Popen[bytes]] = []  # killed processes that may still be running


def _collect_killed() -> None:
    _killed[:] = [process for process in _killed if process.poll() is None]
