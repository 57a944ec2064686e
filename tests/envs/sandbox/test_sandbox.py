"""The sandbox: answers of its interpreter, limits, the end of its process, and hostile code."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.sandbox.sandbox import PROJECT
from tests.support.hostile import LATE, SNIPPETS
from tests.support.sandboxes import interpreters, make, said, settled

FORGE = (
    "import os, sys, struct\nf = sys._getframe()\n"
    "while 'ticket' not in f.f_locals: f = f.f_back\n"
    "os.write(f.f_locals['fd'], struct.pack('>I8s', 2, f.f_locals['ticket']) + b'hi')\n"
)
DEAF = "import signal, time; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
BURN = "end = time.process_time() + 60\nwhile time.process_time() < end: pass"
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "<python>", line 2, in <module>\n    1 / 0\n    ~~^~~\n'
)


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
    assert interpreters() == {pid}
    box.close()
    assert settled(set())
    box.close()
    assert "NameError: name 'x'" in asyncio.run(box.run("x"))


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        *(("", ""), ("print('a'); print('b', end=''); 1 + 1", "a\nb2\n")),
        *(("import sys; print('e', file=sys.stderr)", "e\n"), ("print('\\ud800')", "\\ud800\n")),
        ("def f(x):\n    return x * x\nf(12)", "144\n"),
        ("from fractions import Fraction as F; F(1, 3) + F(1, 6)", "Fraction(1, 2)\n"),
        ("import math, decimal, itertools, statistics, random, datetime, json; 1", "1\n"),
        ("print('\u00e9 \N{GRINNING FACE}')", "\u00e9 \N{GRINNING FACE}\n"),
        ("@__import__('dataclasses').dataclass\nclass P:\n    x: 'int'\nP(1)", "P(x=1)\n"),
        ("x = 1\n1 / 0", f"{TRACEBACK}ZeroDivisionError: division by zero\n"),
        ("1 +", '  File "<python>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n'),
    ],
)
def test_the_answer_is_what_an_interactive_interpreter_would_say(box, code, answer):
    assert asyncio.run(box.run(code)) == answer


def test_an_exception_keeps_the_variables_and_what_was_printed(box):
    assert asyncio.run(box.run("x = 1; print('so far'); boom")).startswith("so far\nTraceback")
    assert asyncio.run(box.run("[0] * 10**12")).endswith("MemoryError\n")
    assert asyncio.run(box.run("x")) == "1\n"


def test_a_long_answer_keeps_both_ends_and_lone_surrogates_lose_no_variable():
    box = make(max_output_chars=1000)
    answer = asyncio.run(box.run("for i in range(100000): print(i)\n'end'"))
    assert answer.startswith("0\n1\n2\n")
    assert answer.endswith("99999\n'end'\n")
    left = int(re.search(r"\.\.\. (\d+) characters left out \.\.\.", answer)[1])
    assert left + 1000 == sum(len(f"{i}\n") for i in range(100000)) + len("'end'\n")
    assert asyncio.run(box.run("x = 7; print('\\ud800' * 1000, end='')")) == "\\ud800" * 1000
    assert asyncio.run(box.run("x")) == "7\n"
    box.close()


def test_processor_time_is_counted_call_by_call():
    box = make(cpu_seconds=1)
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    for _ in range(2):  # each call waits until the time is checked, 1 s after its start
        assert asyncio.run(said(box, burn.format(0.6) + "\ntime.sleep(0.6)")) == ""
    deaf = DEAF + burn.format(5)  # ignores the signal of the kernel's own limit
    assert "used up 1 s of processor time; the interp" in asyncio.run(said(box, deaf))
    assert asyncio.run(box.run("1")) == "1\n"
    box.close()


def test_processor_time_is_bounded_between_calls_as_well(box):
    async def answer_and_burn():
        limited = make(cpu_seconds=1)
        assert await limited.run(DEAF + FORGE + BURN) == "hi"
        (pid,) = interpreters()
        for _ in range(3000):
            if not interpreters():
                break
            await asyncio.sleep(0.01)
        assert pid not in interpreters()
        told = await said(limited, "1")
        limited.close()
        return told

    assert "used up 1 s of processor time; the interp" in asyncio.run(answer_and_burn())


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


def test_an_answer_forged_with_the_true_ticket_affects_only_its_own_interpreter(box):
    assert asyncio.run(box.run(FORGE)) == "hi"
    assert "forged the interpreter's answer" in asyncio.run(said(box, "1"))
    assert asyncio.run(box.run("1")) == "1\n"


def test_installed_packages_can_be_imported_only_if_allowed(box):
    assert "No module named 'sympy'" in asyncio.run(box.run("import sympy"))
    with_packages = make(site_packages=True, memory_mb=1024)
    code = "import sympy, numpy; sympy.factorint(2**67 - 1), int(numpy.arange(4).sum())"
    assert asyncio.run(with_packages.run(code)) == "({193707721: 1, 761838257287: 1}, 6)\n"
    with_packages.close()


async def test_many_sandboxes_work_at_once_and_each_has_its_own_variables():
    boxes = [make() for _ in range(24)]
    await asyncio.gather(*(box.run(f"x = {i}") for i, box in enumerate(boxes)))
    assert len(interpreters()) == 24
    answers = await asyncio.gather(*(box.run("x") for box in boxes))
    assert answers == [f"{i}\n" for i in range(24)]
    began = time.perf_counter()
    for box in boxes:
        box.close()
    assert time.perf_counter() - began < 0.5
    assert settled(set())


async def test_a_sandbox_that_cannot_start_is_an_error_of_the_environment(monkeypatch):
    monkeypatch.setattr("envs.sandbox.sandbox.BOOT", "import sys; sys.exit({!r})")
    with pytest.raises(RuntimeError, match="this machine cannot start a sandbox"):
        await make().run("1")


@pytest.fixture(scope="module")
def bystander():
    """Yield the sandbox of another episode, which is used meanwhile."""
    made = make()
    assert asyncio.run(made.run("kept = 7")) == ""
    yield made
    made.close()
    assert settled(set())


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
from envs.sandbox.sandbox import Limits, Sandbox
box = Sandbox(Limits(call_timeout=60, cpu_seconds=60, memory_mb=256, max_output_chars=9,
    site_packages=False, allow_without_landlock=False))
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
