"""A real sweep: two jobs at once, killed and started again."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from rl.runtime.sweep_folder import SweepFolder
from tests.faults.table import NEVER
from tests.support.launching import COLD, SCRIPTED, alive, called, groups_below, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(1800)]


def test_two_jobs_share_the_cores_and_a_killed_sweep_runs_only_what_is_missing(launcher):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    place = launcher.output / "at-once"
    jobs = ["seed=0,1", f"hydra.sweep.dir={place}", "trainer.checkpoint_every=1"]
    jobs += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "max_steps=8"]
    jobs += [*SCRIPTED, f"+inference.args.faults={place}.json", "--multirun"]
    # Slow answers, so that no job ends before the other has begun.
    slow = Path(f"{place}.json")
    slow.write_text(json.dumps([{"fault": "Hang", "seconds": 2.0, "times": NEVER}]))
    sweep = SweepFolder(place)

    def runs():
        return [RunFolder(Path(r.folder)) for r in sweep.records().values() if r.folder]

    with launcher.start("at-once-${seed}", *jobs, warm=COLD) as process:
        assert wait_for(lambda: len([r for r in runs() if r.num_saved_steps()]) == 2, 400)
        workers = called(process.pid, "rl.trainer")
        cores = {tuple(psutil.Process(pid).cpu_affinity()) for pid in workers}
        assert len(cores) == len(workers) == 2
        groups = groups_below(process.pid) | {process.pid}
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for(lambda: not alive(groups), 5), alive(groups)
    saved = {run.name for run in runs()}
    assert all(record.state == "running" for record in sweep.records().values())

    slow.write_text("[]")
    result = launcher.succeed("at-once-${seed}", *jobs, warm=COLD)
    assert "2 to be resumed; 2 in parallel" in result.screen
    assert {run.name for run in runs()} == saved
    for run in runs():
        assert [row["step"] for row in read_metrics(run)] == list(range(8))
        assert not run.private.path.exists()
        log = next(sweep.log_of(n) for n, r in sweep.records().items() if r.run_name == run.name)
        assert log.read_text().count("8/8 steps") == 1
    assert [record.state for record in sweep.records().values()] == ["done", "done"]
