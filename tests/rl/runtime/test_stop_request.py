"""How the supervisor, other processes of the run, and a launcher answer signals."""

import os
import pickle
import signal
import subprocess
import sys

import pytest

from rl.runtime.child import Child, Reaper, Start
from rl.runtime.folder import RunFolder
from rl.runtime.stop_request import Stopped, StopRequest, stopped_by_signals
from tests.support.launching import ROOT, wait_for

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
