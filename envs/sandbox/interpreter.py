"""The sandbox's own process: runs code as an interactive interpreter would and tells what it said.

    [4 bytes: length][8 bytes: ticket][text]        one message, either way

The ticket of a request comes back with its answer. Code that finds the socket can answer in our
place; all it can tell is what the caller is told anyway, of bounded length.
"""

import ast
import io
import json
import linecache
import os
import struct
import sys
import traceback
import types
from collections import deque
from types import CodeType

from envs.sandbox.confinement import confine

HEADER = struct.Struct(">I8s")
READY = bytes(8)  # ticket of the first message: empty, or why there is no interpreter
NAME = "<python>"
MAX_FRAMES = 5  # of a traceback


class Printed(io.TextIOBase):
    """Keeps the beginning and the end of what is printed, within `limit` characters."""

    def __init__(self, limit: int) -> None:
        self._room = limit // 2
        self._head = self._tail = ""
        self._total = 0

    def write(self, text: str) -> int:
        """Add text."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        free = self._room - len(self._head)
        self._head += text[:free]
        self._tail += text[free:]
        if len(self._tail) > 2 * self._room:  # not at each write: it copies
            self._tail = self._tail[-self._room :]
        self._total += len(text)
        return len(text)

    def text(self) -> str:
        """All of it, or both ends and how much is missing between them."""
        tail = self._tail[-self._room :]
        missing = self._total - len(self._head) - len(tail)
        between = f"\n... {missing} characters left out ...\n" if missing else ""
        return self._head + between + tail


class Interpreter:
    """Python with variables that last from call to call."""

    def __init__(self, max_output_chars: int) -> None:
        self._max_output_chars = max_output_chars
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module

    def run(self, code: str) -> str:
        """Return what `code` prints, the value of its last expression, and its exception."""
        printed = Printed(self._max_output_chars)
        sys.stdout = sys.stderr = printed
        sys.stdin = io.StringIO()
        # Lets a traceback quote the line, though no file holds it.
        linecache.cache[NAME] = (len(code), None, [f"{line}\n" for line in code.splitlines()], NAME)
        names = self._module.__dict__
        try:
            statements, last = _parts(code)
            exec(statements, names)  # what we are here for
            value = eval(last, names) if last else None
            if value is not None:
                printed.write(f"{value!r}\n")
        except BaseException as error:  # noqa: BLE001 (SystemExit is only one way to stop)
            printed.write(_explain(error))
        return printed.text()


def _parts(code: str) -> tuple[CodeType, CodeType | None]:
    """The statements, and the expression at the end if there is one."""
    tree = ast.parse(code, NAME)
    last = None
    match tree.body:
        case [*_, ast.Expr(value=value)]:
            tree.body.pop()
            last = compile(ast.Expression(value), NAME, "eval")
    return compile(tree, NAME, "exec"), last


def _explain(error: BaseException) -> str:
    """The traceback, without our own frames."""
    trace, internal = error.__traceback__, True
    last: deque[types.TracebackType] = deque(maxlen=MAX_FRAMES)  # of what may be a million
    while trace:
        internal = internal and trace.tb_frame.f_code.co_filename != NAME
        if not internal:
            last.append(trace)
        trace = trace.tb_next
    if not last:  # the code did not compile
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, last[0], limit=-MAX_FRAMES))


def receive(fd: int, count: int) -> bytes:
    """Exactly `count` bytes; the process ends where the other side has closed."""
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            os._exit(0)  # without atexit, where the policy's code may have put something
        data += part
    return data


def send(fd: int, ticket: bytes, text: str) -> None:
    """Write one message."""
    content = text.encode(errors="backslashreplace")
    data = HEADER.pack(len(content), ticket) + content
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    """Confine ourselves, then answer until the socket closes. Knobs: JSON, the last argument."""
    knobs = json.loads(sys.argv[-1])
    fd, packages = knobs["fd"], knobs["packages"]
    try:
        confine(
            memory_mb=knobs["memory_mb"],
            packages=packages,
            allow_without_landlock=knobs["allow_without_landlock"],
        )
    except OSError as error:
        send(fd, READY, str(error))
        return
    sys.argv = [""]
    # The code that runs here shall find Python, and not the module that runs it.
    sys.path[:] = [*(path for path in sys.path if path != knobs["ours"]), *packages]
    for name in [name for name in sys.modules if name.split(".")[0] == "envs"]:
        del sys.modules[name]
    interpreter = Interpreter(knobs["max_output_chars"])
    send(fd, READY, "")
    while True:
        length, ticket = HEADER.unpack(receive(fd, HEADER.size))
        code = receive(fd, length).decode(errors="replace")
        send(fd, ticket, interpreter.run(code))
