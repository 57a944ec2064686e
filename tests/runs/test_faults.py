"""The second crash of the only vLLM ends a run; `python -m tests.faults` has the other cases."""

import os
import signal

import pytest

from rl.runtime.metrics import read_metrics, steps_done
from tests.faults.running import ScriptedRun
from tests.faults.table import FAULTS, Case
from tests.support.launching import alive, ended, groups_below, stop, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
BY_NAME = {fault.name: fault for fault in FAULTS}


def case(name: str, moment: str) -> Case:
    """Return a case with one vLLM, in which the fault happens after two steps."""
    return Case(0, BY_NAME[name], moment, replicas=1, step=2)


def test_a_second_crash_within_ten_steps_ends_the_run_with_its_log_and_a_checkpoint(tmp_path):
    one = ScriptedRun(case("KILL inference", "generation"), tmp_path)
    process = one.start("max_steps=500", "trainer.checkpoint_every=0")
    try:
        assert wait_for(lambda: one.is_at("generation", 2), 120)
        groups = groups_below(process.pid)
        os.kill(one.pid("inference"), signal.SIGKILL)
        done = steps_done(read_metrics(one.folder))
        assert wait_for(lambda: steps_done(read_metrics(one.folder)) > done + 1, 120)
        os.kill(one.pid("inference"), signal.SIGKILL)
        result = ended(process, one.folder.path)
    finally:
        stop(process)
    assert result.status == 1
    message = result.screen.rpartition("the run failed")[2]
    assert "inference ended with status -9" in message
    assert "for the 2nd time within 10 steps. The end of " in message
    assert "has fingerprint" in message  # the last lines of the log
    assert one.folder.num_saved_steps() == steps_done(read_metrics(one.folder)) > done
    assert wait_for(lambda: not alive(groups), 5), alive(groups)
