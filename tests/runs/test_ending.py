"""After every kind of end no process is left, and a few lines on the screen say the reason.

`python -m tests.faults` has further cases.
"""

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
from tests.support.launching import COLD, SCRIPTED, alive, below, called, groups_below, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

# Every other option is that of the default environment.
BROKEN = """
from envs.reverse_text import ReverseText
class Broken(ReverseText):
    async def score(self, episode):
        raise KeyError("no such answer")
"""


# A killed vLLM is restarted: tests/runs/test_replicas.py, which also ends a run by SIGTERM.
# test_my_lab.py ends a run by SIGINT.
@pytest.mark.parametrize(
    "victim",
    ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rl.rollouts", "rl.trainer"))],
    ids=["supervisor", "rollouts", "trainer"],
)
def test_a_killed_process_ends_the_run_and_leaves_nothing(victim, launcher):
    name, engine = f"without-{victim[3:] or 'supervisor'}", SCRIPTED if victim else []
    with launcher.start(name, "max_steps=5000", *engine, warm=COLD) as process:
        run_folder = RunFolder(launcher.output / name)
        assert wait_for(lambda: len(read_metrics(run_folder)) > 0, 400)
        groups = groups_below(process.pid)
        # The reaper, the rollouts, the trainer, and one process of the script or two of vLLM.
        assert len(alive(groups)) >= (4 if engine else 5)
        os.kill(called(process.pid, victim)[0] if victim else process.pid, signal.SIGKILL)
        if victim:
            screen, _ = process.communicate(timeout=60)
            assert process.returncode == 1, screen
            assert victim.removeprefix("rl.") in screen.rpartition("the run failed")[2]
            assert "Traceback" not in screen.partition("The end of")[0]
        assert wait_for(lambda: not alive(groups), 5), alive(groups)
        assert process.wait(timeout=5) == (1 if victim else -signal.SIGKILL)


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step(launcher):
    demonstrations = ["loss=sft", "sampler=demonstrations"]
    sizes = ["trainer.ranks=2", "max_steps=5000", "trainer.checkpoint_every=0"]
    run_folder = RunFolder(launcher.output / "two-ranks")
    with launcher.start("two-ranks", *demonstrations, *sizes, warm=COLD) as process:
        assert wait_for(lambda: len(read_metrics(run_folder)) > 2, 400)
        groups = groups_below(process.pid)
        for pid in [*below(process.pid), process.pid]:
            os.kill(pid, signal.SIGUSR2)
        screen, _ = process.communicate(timeout=60)
    assert process.returncode == 0, screen
    assert wait_for(lambda: not alive(groups), 5), alive(groups)
    assert run_folder.resume_point().step == len(read_metrics(run_folder)) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("broken", ["env._target_=broken.Broken", *SCRIPTED],
         ["raised KeyError: 'no such answer' (broken.py:5)",
          "none of the last 128 rollouts could be scored"]),
        ("no-server", ["+inference.args.kv_cache_dtype=none"],
         ["argument --kv-cache-dtype: invalid choice: 'none'",
          "no step was done: nothing is lost, and run_name can be used again"]),
    ],
    ids=["environment", "server"],
)  # fmt: skip
def test_a_run_that_cannot_do_a_step_quotes_the_error_that_caused_it(
    name, overrides, said, launcher
):
    (launcher.output / "broken.py").write_text(BROKEN)
    result = launcher.run(name, "max_steps=3", *overrides, warm=COLD)
    assert result.status == 1
    assert [part for part in said if part not in result.screen] == [], result.screen
    assert "Traceback" not in result.screen.partition("The end of")[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
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
