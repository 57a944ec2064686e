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
    "fork by its number": ("import ctypes; ctypes.CDLL(None).syscall(57)", "^-1$"),
    "fork by its x32 number": ("import ctypes; ctypes.CDLL(None).syscall(0x40000039)", "^-1$"),
    "clone": ("import ctypes; ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)", "^-1$"),
    "os.system": ("import os; os.system('touch {outside}')", r"^(-1|32512)$"),
    "subprocess": ("import subprocess; subprocess.run(['sleep', '99'])", REFUSED),
    "exec": ("import os; os.execv('/bin/sh', ['sh', '-c', 'id'])", REFUSED),
    "threads by the thousand": (
        "from threading import *\nfor _ in range(5000): Thread(target=input).start()",
        "can't start new thread",
    ),
    # signals and other processes
    "kill the parent": ("import os; os.kill({parent}, 9)", REFUSED),
    "signals by a file's owner": ("import fcntl as f; f.fcntl(0, f.F_SETOWN, {parent})", REFUSED),
    "ptrace": ("import ctypes; ctypes.CDLL(None).ptrace(16, {parent}, 0, 0)", "^-1$"),
    "survive the parent": ("import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)", "^-1$"),
    "secrets of the parent": ("open('/proc/{parent}/environ').read()", REFUSED),
    "memory of the parent": ("open('/proc/{parent}/mem', 'rb').read(1)", REFUSED),
    "own secrets": ("import os; sorted(os.environ)", r"^\['LANG', 'OMP_\w+', 'OPENBLAS_\w+'\]$"),
    # files
    "write": ("open('{outside}', 'w').write('x')", REFUSED),
    "read": ("open('{outside}').read()", REFUSED),
    "list the root": ("import os; os.listdir('/')", REFUSED),
    "delete": ("import os; os.remove('{outside}')", REFUSED),
    "truncate": ("import os; os.truncate('{outside}', 0)", REFUSED),
    "fill the disk": ("f = open('/dev/shm/full', 'wb')\nwhile 1: f.write(bytes(2**20))", REFUSED),
    "change the library": ("import os; open(os.__file__, 'a')", REFUSED),
    "io_uring": ("import ctypes; ctypes.CDLL(None).syscall(425, 8, 0)", "^-1$"),
    "namespaces": ("import ctypes; ctypes.CDLL(None).unshare(0x10000000)", "^-1$"),
    "become root": ("import os; os.setuid(0)", REFUSED),
    "more room": ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "not allowed"),
    # network
    "tcp": ("import socket; socket.create_connection(('127.0.0.1', 22))", REFUSED),
    # time
    "endless loop": ("while True: pass", LATE),
    "endless loop in C": ("10**10**8; 1", LATE),
    "endless match": ("import re; re.match('(a|aa)+$', 'a' * 60 + 'b')", LATE),
    "sleep": ("import time; time.sleep(99)", LATE),
    # memory
    "one large object": ("x = bytearray(10**12)", "MemoryError"),
    "anonymous map": ("import mmap; mmap.mmap(-1, 10**11)", "Cannot allocate memory"),
    "memory file": ("import os; os.memfd_create('x')", REFUSED),
    "much output": ("print('x' * 10**7); 1", "characters left out"),
    "deep recursion": (
        f"{DEEP}\ndef f(x): return f([x])\nf(0)",
        "MemoryError|SystemError|crashed the interpreter",
    ),
    "deep repr": (
        f"{DEEP}\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        "crashed the interpreter \\(SIGSEGV\\)|MemoryError",
    ),
    "deep source": ("(" * 10**5, "SyntaxError|MemoryError"),
    # the interpreter itself
    "exit at once": ("import os; os._exit(0)", ENDED),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "crash": ("import ctypes; ctypes.string_at(0)", "crashed the interpreter .SIGSEGV"),
    "close everything": ("import os; os.closerange(0, 99)", ENDED),
    "silence the socket": (f"{EACH_FILE} os.dup2(0, i)", ENDED),
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
    "replace the output": ("import sys; sys.stdout = sys.stderr = None; print(1); 5", "^5$"),
    "empty the modules": ("import sys; sys.modules.clear()", "ended the interpreter|^$"),
    "import what is ours": ("import envs.tools", "No module named 'envs'"),
    "ask the user": ("input()", "EOFError"),
}
