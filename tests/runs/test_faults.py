"""Two faults whose outcome has more to check; `python -m tests.faults` has the other cases."""

import os
import signal

import pytest

from lab.losses.command import main
from rl.runtime.metrics import read_metrics, steps_done
from rl.runtime.token_files import read_rows
from tests.faults.running import ScriptedRun
from tests.faults.table import FAULTS, Case
from tests.support.launching import alive, ended, groups_below, stop, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
BY_NAME = {fault.name: fault for fault in FAULTS}


def case(name: str, moment: str) -> Case:
    """Return a case with one vLLM, in which the fault happens after two steps."""
    return Case(0, BY_NAME[name], moment, replicas=1, step=2)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_batch_of_a_step_whose_loss_is_nan_is_kept_for_compare_losses(tmp_path, capsys):
    one = ScriptedRun(case("loss is NaN once", "generation"), tmp_path)
    few = ["record.num_groups=0", "max_steps=6", "trainer.max_nonfinite_steps=2"]
    result = ended(one.start(*few), one.folder.path)
    assert result.status == 0, result.screen
    (step,) = [row["step"] for row in result.metrics if row.get("train/skipped")]
    said = f"python compare_losses.py {one.folder} steps={step} loss=<another>"
    assert said in " ".join(result.screen.split())
    assert main([str(one.folder), f"steps={step}", "loss=dapo"]) == 0
    shown = capsys.readouterr().out
    rows = read_rows(one.folder, step)
    count = sum(int(row.sampled["mask"].sum()) for row in rows)
    assert shown.startswith(f"{count} tokens of 1 updates, steps {step} to {step}.")
    assert "loss=dapo changes loss" in shown
    assert "gradients differ most" not in shown  # all rewards are 0, so both losses agree
    assert len({row.id.split(".")[0] for row in rows}) == 2  # both groups
