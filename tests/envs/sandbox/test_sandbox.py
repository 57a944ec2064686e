"""The sandbox: answers, limits, the end of its process, hostile code, and each layer by itself."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs.maths.calculations import Calculations
from envs.maths.environment import Maths
from envs.maths.grading import Grader
from envs.maths.math_python import MathPython
from envs.mixture import Mixture
from envs.sandbox import sandbox
from envs.sandbox.confinement import ALLOWED, MACHINES
from envs.sandbox.sandbox import PROJECT, Limits
from tests.support.sandboxes import OPTIONS, close, interpreters, make, said, settled


@pytest.fixture
def box():
    made = make()
    yield made
    made.close()


def test_no_process_until_the_first_call_then_one_and_none_after_closing(box):
    assert interpreters() == set()
    assert asyncio.run(box.run("x = 6 * 7")) == ""
    (pid,) = interpreters()
    assert asyncio.run(box.run("x")) == "42\n"
    # An exception keeps the variables and what was printed.
    assert asyncio.run(box.run("print('so far'); [0] * 10**12")).startswith("so far\nTraceback")
    assert asyncio.run(box.run("x")) == "42\n"
    assert interpreters() == {pid}
    box.close()
    assert settled(set())
    box.close()
    assert "NameError: name 'x'" in asyncio.run(box.run("x"))


def test_an_answer_is_what_was_printed_and_the_last_value_and_a_long_one_keeps_both_ends():
    box = make(max_output_chars=1000)
    code = "import sys; print('é \\ud800'); print('b', end='', file=sys.stderr); 1 + 1"
    assert asyncio.run(box.run(code)) == "é \\ud800\nb2\n"
    answer = asyncio.run(box.run("for i in range(100000): print(i)\n'end'"))
    assert answer.startswith("0\n1\n2\n")
    assert answer.endswith("99999\n'end'\n")
    left = int(re.search(r"\.\.\. (\d+) characters left out \.\.\.", answer)[1])
    assert left + 1000 == sum(len(f"{i}\n") for i in range(100000)) + len("'end'\n")
    box.close()


def test_processor_time_is_counted_call_by_call():
    box = make(cpu_seconds=1)
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    for _ in range(2):  # each call waits until the time is checked, 1 s after its start
        assert asyncio.run(said(box, burn.format(0.6) + "\ntime.sleep(0.6)")) == ""
    # This code ignores the signal of the kernel's own limit.
    deaf = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    told = asyncio.run(said(box, deaf + burn.format(5)))
    assert "used up 1 s of processor time; the interp" in told
    assert asyncio.run(box.run("1")) == "1\n"
    box.close()


def test_when_memory_runs_out_the_kernel_ends_a_sandbox_first(box):
    asyncio.run(box.run(""))
    (pid,) = interpreters()
    score = Path(f"/proc/{pid}/oom_score_adj")
    assert score.read_text() == "1000\n"
    lower = f"open({str(score)!r}, 'w').write('0')"
    assert "denied" in asyncio.run(box.run(lower))
    assert score.read_text() == "1000\n"


def test_the_answer_of_a_cancelled_call_does_not_reach_the_next_call(box):
    async def give_up():
        await box.run("")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run("import time; time.sleep(1); print('late')"), 0.5)
        return await box.run("print('next')")

    assert asyncio.run(give_up()) == "next\n"


@pytest.fixture(scope="module")
def bystander():
    """Yield the sandbox of another episode, which is used meanwhile."""
    made = make()
    assert asyncio.run(made.run("kept = 7")) == ""
    yield made
    made.close()
    assert settled(set())


# Hostile code and its expected refusal. {outside} is a file outside the sandbox, {parent} the
# process that runs the tests.
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


@pytest.mark.parametrize("name", SNIPPETS)
def test_hostile_code_is_stopped_and_affects_nothing_else(
    name, bystander, tmp_path, monkeypatch, request
):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    monkeypatch.setenv("SECRET", "hunter2")
    before = interpreters()
    code, expected = SNIPPETS[name]
    box = make(memory_mb=128, call_timeout=1.0 if expected == LATE else 60.0)
    request.addfinalizer(box.close)
    answer = asyncio.run(said(box, code.format(outside=outside, parent=os.getpid())))
    assert re.search(expected, answer.strip()), answer
    assert "hunter2" not in answer
    assert len(answer) < 1200
    assert asyncio.run(bystander.run("kept")) == "7\n"
    # The sandbox still works: unchanged, or with a new process at the second call at the latest.
    assert "2\n" in (asyncio.run(said(box, "1 + 1")) for _ in range(2))
    assert len(interpreters() - before) == 1
    box.close()
    assert settled(before)
    assert [p.name for p in tmp_path.iterdir()] == ["outside"]
    assert outside.read_text() == "untouched"
    assert outside.stat().st_mode & 0o777 == 0o644
    assert not Path("/dev/shm/full").exists()


ORPHAN = """
import asyncio
from tests.support.sandboxes import make
box = make()
async def main():
    await box.run("1")
    print("ready", flush=True)
    await box.run("while True: pass")
asyncio.run(main())
"""


def test_no_sandbox_outlives_a_killed_parent():
    before = interpreters()
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, cwd=PROJECT)
    try:
        assert parent.stdout.readline() == b"ready\n"
        assert len(interpreters() - before) == 1
    finally:
        parent.kill()
        parent.communicate()
    assert settled(before)


def python(code):
    """Run code in a new interpreter that can import this checkout; return what it prints."""
    boot = f"import sys; sys.path.append({PROJECT!r})\n"
    python = [sys.executable, "-ISc", boot + code]
    return subprocess.run(python, capture_output=True, text=True, check=True).stdout


def test_without_landlock_python_itself_refuses_to_read_other_files(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("x")
    code = f"""
from envs.sandbox import confinement
from envs.sandbox.confinement import restrict_reading, readable_paths
restrict_reading(readable_paths([]))
import ctypes, decimal, hashlib, io, os, pathlib
attempts = [
    lambda: open({str(outside)!r}),
    lambda: os.open({str(outside)!r}, 0),
    lambda: pathlib.Path("/proc/self/environ").read_bytes(),
    lambda: io.FileIO(os.path.dirname(os.__file__) + "/../../../../../../../../etc/passwd"),
    lambda: os.listdir("/"),
    lambda: list(os.scandir({str(outside.parent)!r})),
    lambda: ctypes.CDLL(None),
]
for attempt in attempts:
    try:
        print("read", attempt())
    except PermissionError:
        print("refused")
print(len(os.listdir(os.path.dirname(os.__file__))) > 100)
"""
    assert python(code).split() == ["refused"] * 7 + ["True"]


def test_the_filter_alone_refuses_to_open_a_file_for_changes_and_cannot_be_replaced(tmp_path):
    """Without Landlock, because Landlock would hide a flag that the filter misses."""
    file = tmp_path / "file"
    file.write_text("untouched")
    code = f"""
import os
from envs.sandbox import confinement
from envs.sandbox.confinement import drop_capabilities, apply_seccomp
drop_capabilities()
apply_seccomp()
print(os.read(os.open({str(file)!r}, os.O_RDONLY), 99))
flags = [os.O_TRUNC, os.O_CREAT, os.O_ASYNC, os.O_WRONLY, os.O_RDWR]
attempts = [lambda flag=flag: os.open({str(file)!r}, flag) for flag in flags]
attempts.append(lambda: os.open({str(tmp_path)!r}, os.O_RDWR | os.O_TMPFILE))
for attempt in [*attempts, apply_seccomp]:
    try:
        print("not refused", attempt())
    except PermissionError:
        print("refused")
"""
    assert python(code).splitlines() == ["b'untouched'"] + ["refused"] * 7
    assert file.read_text() == "untouched"


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_have_the_numbers_of_the_kernel(machine):
    headers = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
    header = Path("/usr/include") / headers[machine]
    if not header.exists():
        pytest.skip("needs the kernel's headers (linux-libc-dev)")
    column, _, partly = MACHINES[machine]
    rows = [row.split() for row in ALLOWED.split(",")]
    ours = {row[0]: int(row[column]) for row in rows if row[column] != "-"} | partly
    kernels = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    kernels["newfstatat"] = kernels.get("newfstatat", kernels.get("fstatat"))
    assert {name: int(kernels[name]) for name in ours} == ours


MATHS = {"name": "maths", "instruction": "", "reward_weights": {}}
MATHS["questions"] = Calculations(kinds=["sum"], digits=2, num_train=2, num_eval=2)


def test_code_runs_without_landlock_only_if_the_configuration_accepts_it(monkeypatch):
    forget = "from envs.sandbox import confinement as c; c.apply_landlock = lambda paths: False"
    boot = sandbox.BOOT.replace("from envs", f"{forget}; from envs", 1)
    monkeypatch.setattr(sandbox, "BOOT", boot)
    with pytest.raises(RuntimeError, match=r"no Landlock.*allow_without_landlock=true"):
        asyncio.run(make().run("1"))
    before = interpreters()
    refusing, accepted = (
        Grader(workers=1, cpu_seconds=5, memory_mb=1024, allow_without_landlock=allow)
        for allow in (False, True)
    )
    python = {"max_turns": 2, "max_concurrent": 2, "sandbox": Limits(**OPTIONS)}
    for env in (Maths(**MATHS, grader=refusing), MathPython(**MATHS, grader=accepted, **python)):
        with pytest.raises(ValueError, match="no Landlock"):
            Mixture(envs={"maths": env}, weights={"maths": 1.0}).check_machine()
    Maths(**MATHS, grader=accepted).check_machine()
    assert settled(before)  # the processes are killed without waiting
    assert asyncio.run(accepted.means_same("x + 1", "1 + x")) is True
    close(accepted)
