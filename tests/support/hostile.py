"""List hostile code and the expected refusal.

{outside} is a file outside the sandbox, {parent} the process that runs the tests.
"""

REFUSED = "not permitted|denied"
LATE = "took longer than 1 s; the interpreter was restarted and its variables are gone"
ENDED = "ended the interpreter; the interpreter was restarted"
DEEP = "import sys; sys.setrecursionlimit(10**9)"
EACH_FILE = "import os\nfor i in range(3, 60):"
FORGED = "forged the interpreter's answer; the interpreter was restarted"

SNIPPETS = {
    # processes and threads
    "fork bomb": ("import os\nwhile True: os.fork()", REFUSED),
    "fork by its x32 number": ("import ctypes; ctypes.CDLL(None).syscall(0x40000039)", "^-1$"),
    "exec": ("import os; os.execv('/bin/sh', ['sh', '-c', 'id'])", REFUSED),
    "threads by the thousand": (
        "from threading import *\nfor _ in range(5000): Thread(target=input).start()",
        "can't start new thread",
    ),
    # signals and other processes
    "kill the parent": ("import os; os.kill({parent}, 9)", REFUSED),
    "signals by a file's owner": ("import fcntl as f; f.fcntl(0, f.F_SETOWN, {parent})", REFUSED),
    "secrets of the parent": ("open('/proc/{parent}/environ').read()", REFUSED),
    "own secrets": ("import os; sorted(os.environ)", r"^\['LANG', 'OMP_\w+', 'OPENBLAS_\w+'\]$"),
    # files
    "write": ("open('{outside}', 'w').write('x')", REFUSED),
    "read": ("open('{outside}').read()", REFUSED),
    "delete": ("import os; os.remove('{outside}')", REFUSED),
    "fill the disk": ("f = open('/dev/shm/full', 'wb')\nwhile 1: f.write(bytes(2**20))", REFUSED),
    "io_uring": ("import ctypes; ctypes.CDLL(None).syscall(425, 8, 0)", "^-1$"),
    "more room": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "not allowed"),
    # network
    "tcp": ("import socket; socket.create_connection(('127.0.0.1', 22))", REFUSED),
    # time
    "endless loop": ("while True: pass", LATE),
    "endless loop in C": ("10**10**8; 1", LATE),
    "sleep": ("import time; time.sleep(99)", LATE),
    # memory
    "one large object": ("x = bytearray(10**12)", "MemoryError"),
    "much output": ("print('x' * 10**7); 1", "characters left out"),
    "deep recursion": (
        f"{DEEP}\ndef f(x): return f([x])\nf(0)",
        "MemoryError|SystemError|crashed the interpreter",
    ),
    # the interpreter itself
    "exit at once": ("import os; os._exit(0)", ENDED),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "crash": ("import ctypes; ctypes.string_at(0)", "crashed the interpreter .SIGSEGV"),
    "close everything": ("import os; os.closerange(0, 99)", ENDED),
    "drain the socket": (f"{EACH_FILE}\n try: os.read(i, 9)\n except OSError: 0", LATE),
    "scribble on the socket": (
        f"{EACH_FILE}\n try: os.write(i, bytes(99))\n except OSError: 0",
        FORGED,
    ),
    "promise a long answer": (
        "import os, sys\nf = sys._getframe()\nwhile 'ticket' not in f.f_locals: f = f.f_back\n"
        "os.write(f.f_locals['fd'], b'\\xff' * 4 + f.f_locals['ticket'])",
        FORGED,
    ),
    "replace the built-ins": (
        "import builtins\nfor n in dir(builtins):\n if n != 'setattr': setattr(builtins, n, None)",
        "ended the interpreter|TypeError|^$",
    ),
    "import what is ours": ("import envs.tools", "No module named 'envs'"),
}
