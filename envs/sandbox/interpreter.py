"""The sandbox's own process, which runs code like an interactive interpreter.

    [4 bytes: length][8 bytes: ticket][text]        the format of messages in both directions

Each request has a random ticket, and the answer repeats this ticket. Code that finds the socket can
forge an answer, but gains nothing, because the caller treats every answer as output of the code and
limits the answer's length.
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

from envs.sandbox.confinement import confine

HEADER = struct.Struct(">I8s")
# Ticket of all messages until the sandbox is ready. The answers are empty or error messages.
READY = bytes(8)
NAME = "<python>"  # file name of the policy's code in tracebacks
MAX_FRAMES = 5  # maximum number of traceback frames in the output


class CappedOutput(io.TextIOBase):
    """An output stream that keeps only its first and its last `limit` / 2 characters."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = self._tail = ""
        self._total = 0

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        free = self._half - len(self._head)
        self._head += text[:free]
        self._tail += text[free:]
        if len(self._tail) > 2 * self._half:  # shorten rarely, because slicing copies text
            self._tail = self._tail[-self._half :]
        self._total += len(text)
        return len(text)

    def text(self) -> str:
        tail = self._tail[-self._half :]
        missing = self._total - len(self._head) - len(tail)
        note = f"\n... {missing} characters left out ...\n" if missing else ""
        return self._head + note + tail


class Interpreter:
    """A Python interpreter that keeps its variables between calls."""

    def __init__(self, max_output_chars: int) -> None:
        self._max_output_chars = max_output_chars
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module

    def run(self, code: str) -> str:
        """Run `code`. Return its output, its last expression's value and any traceback."""
        printed = CappedOutput(self._max_output_chars)
        sys.stdout = sys.stderr = printed
        sys.stdin = io.StringIO()
        # With the source in linecache, a traceback can quote lines although there is no file.
        linecache.cache[NAME] = (len(code), None, [f"{line}\n" for line in code.splitlines()], NAME)
        names = self._module.__dict__
        try:
            tree, last = ast.parse(code, NAME), None
            if tree.body and isinstance(ending := tree.body[-1], ast.Expr):
                last = compile(ast.Expression(ending.value), NAME, "eval")
                tree.body.pop()
            exec(compile(tree, NAME, "exec"), names)
            value = eval(last, names) if last else None
            if value is not None:
                printed.write(f"{value!r}\n")
        except BaseException as error:  # noqa: BLE001 (SystemExit included)
            printed.write(_traceback_of(error))
        return printed.text()


def _traceback_of(error: BaseException) -> str:
    trace, internal = error.__traceback__, True
    last: deque[types.TracebackType] = deque(maxlen=MAX_FRAMES)
    while trace:
        internal = internal and trace.tb_frame.f_code.co_filename != NAME
        if not internal:
            last.append(trace)
        trace = trace.tb_next
    if not last:  # no frame belongs to the code, for example if it did not compile
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, last[0], limit=-MAX_FRAMES))


def receive(stream: io.BufferedReader, count: int) -> bytes:
    """Return exactly `count` bytes. End the process if the other side closed the socket."""
    data = stream.read(count)
    if len(data) < count:
        os._exit(0)  # skips atexit functions that the policy's code registered
    return data


def send(stream: io.BufferedWriter, ticket: bytes, text: str) -> None:
    content = text.encode(errors="backslashreplace")
    stream.write(HEADER.pack(len(content), ticket) + content)
    stream.flush()


def main() -> None:
    """Confine this process and answer requests. sys.argv[-1] holds the options as JSON."""
    options = json.loads(sys.argv[-1])
    packages, fd = options["confine"]["packages"], options["fd"]
    requests, answers = os.fdopen(fd, "rb"), os.fdopen(fd, "wb", closefd=False)
    try:
        confine(**options["confine"])
    except OSError as error:
        send(answers, READY, str(error))
        return
    sys.argv = [""]
    # The policy's code may import Python's library and `packages`, but not this project.
    sys.path[:] = [*(path for path in sys.path if path != options["root"]), *packages]
    for name in [name for name in sys.modules if name.split(".")[0] == "envs"]:
        del sys.modules[name]
    interpreter = Interpreter(options["max_output_chars"])
    send(answers, READY, "")
    while True:
        length, ticket = HEADER.unpack(receive(requests, HEADER.size))
        send(answers, ticket, interpreter.run(receive(requests, length).decode(errors="replace")))
