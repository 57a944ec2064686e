"""What a scheduler's signals do to the supervisor, to a part of the run, and to a launcher."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl.run.child import Child, Reaper
from rl.run.folder import RunFolder
from rl.run.stop_request import Stopped, StopRequest, stopped_by_signals
from tests.support.launching import wait_for

REPO = Path(__file__).parents[3]
PART = """
import sys, time
from pathlib import Path
from rl.run.folder import RunFolder
from rl.run.stop_request import pass_on_signals
pass_on_signals(RunFolder(Path(sys.argv[1])))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_part_passes_the_first_signal_on_and_ends_by_the_second(number, tmp_path):
    command = [sys.executable, "-c", PART, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) as part:
        assert part.stdout is not None
        assert part.stdout.readline() == b"ready\n"
        # The supervisor may have been faster: what counts is what this process got.
        RunFolder(tmp_path).stop_request.touch()
        part.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            part.wait(timeout=0.3)
        part.send_signal(number)
        assert part.wait(timeout=30) == -number


def test_what_is_no_part_of_ours_does_not_see_the_notice_and_ends_when_told(tmp_path):
    with Reaper() as reaper:
        child = Child("vllm", ["sleep", "60"], log=tmp_path / "log", reaper=reaper)
        child.start()
        os.kill(child.group or 0, signal.SIGUSR2)
        os.kill(child.group or 0, signal.SIGTERM)
        assert wait_for(lambda: child.returncode == -signal.SIGTERM, 10)
        child.end()


def test_a_signal_after_the_time_limit_is_the_first_one():
    stop = StopRequest()
    stop.waits = stop.asked = True  # rl/supervisor/time_limit.py asked
    stop(signal.SIGTERM)
    assert stop.number == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGUSR2)


@pytest.mark.parametrize("taken", [True, False])
def test_whoever_took_the_signal_before_us_gets_it_when_the_run_has_saved(taken):
    heard: list[int] = []
    handler = (lambda number, _: heard.append(number)) if taken else signal.SIG_DFL
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with stopped_by_signals() as stop:
            stop.waits = True
            signal.raise_signal(signal.SIGUSR2)
        assert not heard
        stopped = Stopped(stop.number)
        stopped.hand_on()  # where nobody took it, it would end this process
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2] * taken
    assert stopped.code == 0


@pytest.mark.parametrize("waits", [False, True], ids=["nothing to save yet", "the second"])
def test_a_run_that_a_signal_ends_at_once_says_by_which_one(waits):
    def run():
        with stopped_by_signals() as stop:
            if waits:
                stop.waits = waits
                signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(Stopped) as stopped:
        run()
    assert (stopped.value.number, stopped.value.code) == (signal.SIGUSR2, 130)


def test_control_c_is_no_scheduler():
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        raise KeyboardInterrupt


def test_how_a_run_was_stopped_crosses_to_another_process():
    stopped = pickle.loads(pickle.dumps(Stopped(signal.SIGTERM, 130)))
    assert (stopped.number, stopped.code) == (signal.SIGTERM, 130)
