"""Children never outlive the supervisor, and how the processes of a run answer signals."""

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl.runtime.child import (
    Child,
    Reaper,
    Start,
    group_alive,
    last_lines,
    python_module,
)
from rl.runtime.folder import RunFolder
from rl.runtime.stop_request import Stopped, StopRequest, stopped_by_signals
from tests.support.launching import ROOT, wait_for

# A child that ends when told to, and a grandchild in its group that does not.
FAMILY = (
    "(trap '' TERM HUP INT; exec sleep 30) & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Family:
    """`command` starts a child with a stubborn grandchild; calling it gives both process ids."""

    def __init__(self, pids: Path) -> None:
        self.pids, self.command = pids, ["sh", "-c", FAMILY.format(pids=pids)]

    def __call__(self) -> list[int]:
        assert wait_for(self.pids.exists, 5)
        return [int(pid) for pid in self.pids.read_text().split()]


@pytest.fixture
def family(tmp_path):
    family = Family(tmp_path / "pids")
    yield family
    if family.pids.exists():
        for pid in family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make(tmp_path):
    """Return a function that makes children of one reaper, with the log `tmp_path`/log."""
    with Reaper() as reaper:
        yield lambda *command, **options: Child(
            Start("child", command, tmp_path / "log", **options), reaper
        )


def test_a_grandchild_that_ignores_term_is_dead_after_the_end(family, make):
    child = make(*family.command)
    child.end()  # a child that has not started
    child.start()
    group, groups = child.group, child._reaper._groups
    assert all(alive(pid) for pid in family())
    assert child.returncode is None
    assert group_alive(group)
    assert group in groups
    child.end()
    assert not any(alive(pid) for pid in family())
    assert child.group is child.returncode is None
    assert group not in groups  # the kernel may reuse its number


def test_a_child_has_its_own_group_its_environment_and_a_log_that_later_starts_continue(
    make, tmp_path
):
    for word in ("first", "second"):
        command = ["sh", "-c", "echo out $WORD; echo err >&2; exit 3"]
        with make(*command, env={"WORD": word}) as child:
            assert child.group != os.getpgrp()
            assert wait_for(lambda child=child: child.returncode == 3, 5)
    assert (tmp_path / "log").read_text() == "out first\nerr\nout second\nerr\n"


def test_the_end_of_a_log_has_twenty_lines_and_the_last_state_of_a_progress_bar(tmp_path):
    lines = [*(f"line {number}" for number in range(24)), "10%\r50%"]
    (tmp_path / "log").write_bytes("\r\n".join([*lines, "", ""]).encode())
    assert last_lines(tmp_path / "log").split("\n") == [*lines[5:24], "50%"]


@pytest.mark.parametrize("ends_on_term", [True, False])
def test_a_child_that_takes_term_as_a_request_is_killed_at_once(ends_on_term, make, tmp_path):
    script = "trap 'echo asked; exit 7' TERM; sleep 30 & echo ready; wait"
    with make("sh", "-c", script, ends_on_term=ends_on_term) as child:
        assert wait_for(lambda: child.tail() == "ready", 5)
        child.kill()
        assert wait_for(lambda: child.returncode == (7 if ends_on_term else -signal.SIGKILL), 5)
    assert ("asked" in (tmp_path / "log").read_text()) == ends_on_term


HOLDER = """
import sys, time
from pathlib import Path
from rl.runtime.child import Child, Reaper, Start
with Reaper() as reaper:
    child = Child(Start("family", sys.argv[2:], Path(sys.argv[1])), reaper)
    child.start()
    print(reaper._process.pid, flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize("reaper_died", [False, True])
def test_killing_the_holder_ends_all_or_without_the_reaper_the_child(reaper_died, family, tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "log"), *family.command]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        reaper = int(holder.stdout.readline())
        everyone = [*family(), reaper]
        assert all(alive(pid) for pid in everyone)
        if reaper_died:  # the kernel ends the child, but not the grandchild
            os.kill(reaper, signal.SIGKILL)
            everyone = everyone[:1]
        holder.kill()
    assert wait_for(lambda: not any(alive(pid) for pid in everyone), 5)


def test_a_reaper_that_was_killed_is_replaced_and_knows_all_groups(family, tmp_path):
    gone = subprocess.Popen(["true"], start_new_session=True)
    gone.wait()
    with Reaper() as reaper:
        first = reaper._process
        reaper.ensure_alive()
        assert reaper._process is first
        child = Child(Start("family", family.command, tmp_path / "log"), reaper)
        child.start()
        first.kill()
        first.wait()
        reaper.register(gone.pid)  # a dead reaper does not receive this group, which has ended
        reaper.ensure_alive()
        assert reaper._process.poll() is None
        everyone = family()
    assert reaper._process.returncode == 0
    assert not any(alive(pid) for pid in everyone)
    assert child.returncode == -signal.SIGTERM


def test_the_reaper_ignores_signals_and_does_not_end_forgotten_groups():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as stranger, Reaper() as reaper:
        reaper.register(stranger.pid)
        reaper.unregister(stranger.pid)

        def ignores_all() -> bool:
            status = Path(f"/proc/{reaper._process.pid}/status").read_text()
            ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
            return all(ignored >> (number - 1) & 1 for number in numbers)

        assert wait_for(ignores_all, 5)  # Python takes a moment to start
        reaper.__exit__()
        assert reaper._process.returncode == 0
        assert stranger.poll() is None
        stranger.kill()


def test_a_file_in_the_working_folder_replaces_no_library_in_a_child(tmp_path):
    for library in ("queue", "rl", "envs", "msgspec", "asyncio", "pickle", "vllm"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('replaced')")
    command = python_module("rl.dry_call.learn")
    done = subprocess.run(command, cwd=tmp_path, input="", capture_output=True, text=True)
    assert "replaced" not in done.stderr
    assert "EOFError" in done.stderr


RANK = """
import sys, time
from pathlib import Path
from rl.runtime.folder import RunFolder
from rl.runtime.stop_request import pass_on_signals
pass_on_signals(RunFolder(Path(sys.argv[1])))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_rank_passes_the_first_signal_on_and_ends_by_the_second(number, tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"ready\n"
        if number == signal.SIGTERM:
            # Even if the supervisor requested the stop before, this is the rank's first signal.
            RunFolder(tmp_path).stop_request.touch()
        rank.send_signal(number)
        assert wait_for(RunFolder(tmp_path).stop_request.exists, 10)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(timeout=0.3)
        rank.send_signal(number)
        assert rank.wait(timeout=30) == -number


def test_vllm_ignores_a_schedulers_notice_and_ends_on_term(tmp_path):
    start = Start("vllm", ["sleep", "60"], tmp_path / "log")
    with Reaper() as reaper, Child(start, reaper) as child:
        os.kill(child.group or 0, signal.SIGUSR2)
        os.kill(child.group or 0, signal.SIGTERM)
        assert wait_for(lambda: child.returncode == -signal.SIGTERM, 10)


def test_a_signal_after_the_time_limit_is_the_first_one():
    stop = StopRequest()
    stop.waits = stop.asked = True  # rl/supervisor/time_limit.py asked
    stop(signal.SIGTERM)
    assert stop.number == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGUSR2)


@pytest.fixture
def handled():
    """Return signal.signal, whose changes are undone."""
    numbers = (signal.SIGUSR2, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield signal.signal
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("has_handler", [True, False])
def test_an_earlier_handler_gets_the_signal_after_the_run_has_saved(has_handler, handled):
    heard: list[int] = []
    handler = (lambda number, _: heard.append(number)) if has_handler else signal.SIG_DFL
    handled(signal.SIGUSR2, handler)
    handled(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; it stays ignored
    with stopped_by_signals() as stop:
        stop.waits = True
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR2)
    assert (stop.asked, stop.number, heard) == (True, signal.SIGUSR2, [])
    stopped = Stopped(stop.number)
    stopped.raise_signal_again()  # without a handler the signal would end this process
    assert heard == [signal.SIGUSR2] * has_handler
    assert stopped.code == 0


@pytest.mark.parametrize("waits", [False, True], ids=["nothing to save yet", "the second"])
def test_a_run_that_a_signal_ends_at_once_names_the_signal(waits):
    def run():
        with stopped_by_signals() as stop:
            stop.waits = waits
            for _ in range(2):
                signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(Stopped) as stopped:
        run()
    for error in (stopped.value, pickle.loads(pickle.dumps(stopped.value))):
        assert (error.number, error.code) == (signal.SIGUSR2, 130)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():  # not so Ctrl-C
        raise KeyboardInterrupt
