"""After every kind of end no process is left, and a few lines on the screen say the reason.

`python -m tests.faults` has further cases.
"""

import os
import signal

import pytest

from lab.losses.command import main
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics, steps_done
from rl.runtime.token_files import read_rows
from tests.faults.running import ScriptedRun
from tests.faults.table import FAULTS, Case
from tests.support import launching
from tests.support.launching import COLD, SCRIPTED, alive, below, called, ended, groups_below

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
        assert launching.wait_for(lambda: len(read_metrics(run_folder)) > 0, 400)
        groups = groups_below(process.pid)
        # The reaper, the rollouts, the trainer, and one process of the script or two of vLLM.
        assert len(alive(groups)) >= (4 if engine else 5)
        os.kill(called(process.pid, victim)[0] if victim else process.pid, signal.SIGKILL)
        if victim:
            screen, _ = process.communicate(timeout=60)
            assert process.returncode == 1, screen
            assert victim.removeprefix("rl.") in screen.rpartition("the run failed")[2]
            assert "Traceback" not in screen.partition("The end of")[0]
        assert launching.wait_for(lambda: not alive(groups), 5), alive(groups)
        assert process.wait(timeout=5) == (1 if victim else -signal.SIGKILL)


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step(launcher):
    demonstrations = ["loss=sft", "sampler=demonstrations"]
    sizes = ["trainer.ranks=2", "max_steps=5000", "trainer.checkpoint_every=0"]
    run_folder = RunFolder(launcher.output / "two-ranks")
    with launcher.start("two-ranks", *demonstrations, *sizes, warm=COLD) as process:
        assert launching.wait_for(lambda: len(read_metrics(run_folder)) > 2, 400)
        groups = groups_below(process.pid)
        for pid in [*below(process.pid), process.pid]:
            os.kill(pid, signal.SIGUSR2)
        screen, _ = process.communicate(timeout=60)
    assert process.returncode == 0, screen
    assert launching.wait_for(lambda: not alive(groups), 5), alive(groups)
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


def case(name: str) -> Case:
    """Return a case with one vLLM, in which the fault happens after two steps."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    return Case(0, fault, "generation", replicas=1, step=2)


@pytest.mark.slow
def test_a_second_crash_within_ten_steps_ends_the_run_with_its_log_and_a_checkpoint(tmp_path):
    one = ScriptedRun(case("KILL inference"), tmp_path)
    with one.start("max_steps=500", "trainer.checkpoint_every=0") as process:
        assert launching.wait_for(lambda: one.is_at("generation", 2), 120)
        groups = groups_below(process.pid)
        os.kill(one.pid("inference"), signal.SIGKILL)
        done = steps_done(read_metrics(one.folder))
        assert launching.wait_for(lambda: steps_done(read_metrics(one.folder)) > done + 1, 120)
        os.kill(one.pid("inference"), signal.SIGKILL)
        result = ended(process, one.folder.path)
    assert result.status == 1
    message = result.screen.rpartition("the run failed")[2]
    assert "for the 2nd time within 10 steps.\nThe end of " in message
    assert "has fingerprint" in message  # the last lines of the log
    assert one.folder.num_saved_steps() == steps_done(read_metrics(one.folder)) > done
    assert launching.wait_for(lambda: not alive(groups), 5), alive(groups)


@pytest.mark.slow
def test_the_batch_of_a_step_whose_loss_is_nan_is_kept_for_compare_losses(tmp_path, capsys):
    one = ScriptedRun(case("loss is NaN once"), tmp_path)
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
    assert len({row.id.split(".")[0] for row in rows}) == 2  # both groups
