"""After every kind of end no process is left, and a few lines on the screen say the reason."""

import os
import signal
from contextlib import contextmanager

import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from tests.support.launching import COLD, SCRIPTED, alive, below, groups_below, stop, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

BROKEN = """
from envs.protocol import Environment, Example
class Broken(Environment):
    name = "broken"
    def __init__(self, *, reward_weights: dict[str, float]) -> None:
        self.reward_weights = reward_weights
    def examples(self, split):
        return [Example(i, self.name, [{"role": "user", "content": str(i)}]) for i in range(64)]
    async def score(self, episode):
        raise KeyError("no such answer")
"""
BROKEN_RUN = [
    "env._target_=broken.Broken", "~env.min_length", "~env.max_length", "~env.num_train",
    "~env.num_eval", "~env.reward_weights.exact", "~env.reward_weights.similarity",
    "+env.reward_weights.right=1.0", "max_steps=3",
]  # fmt: skip


@contextmanager
def started(launcher, name, *engine):
    """Yield a run that has done its first step, and the process groups of all its processes."""
    process = launcher.start(name, "max_steps=5000", *engine, warm=COLD)
    metrics = launcher.output / name / "metrics.jsonl"
    try:
        assert wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 400)
        groups = groups_below(process.pid)
        # The reaper, the rollouts, the trainer, and one process of the script or two of vLLM.
        assert len(alive(groups)) >= (4 if engine else 5)
        yield process, groups
    finally:
        stop(process)


# test_my_lab.py ends a run by SIGINT, and test_replicas.py one by SIGTERM.
def test_nothing_is_left_five_seconds_after_the_supervisor_got_kill(launcher):
    with started(launcher, "killed") as (process, groups):
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for(lambda: not alive(groups), 5), alive(groups)
        assert process.wait(timeout=5) == -signal.SIGKILL


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step(launcher):
    demonstrations = ["loss=sft", "sampler=demonstrations"]
    sizes = ["trainer.ranks=2", "max_steps=5000", "trainer.checkpoint_every=0"]
    process = launcher.start("two-ranks", *demonstrations, *sizes, warm=COLD)
    run_folder = RunFolder(launcher.output / "two-ranks")
    try:
        assert wait_for(lambda: len(read_metrics(run_folder)) > 2, 400)
        groups = groups_below(process.pid)
        for pid in [*below(process.pid), process.pid]:
            os.kill(pid, signal.SIGUSR2)
        screen, _ = process.communicate(timeout=60)
    finally:
        stop(process)
    assert process.returncode == 0, screen
    assert wait_for(lambda: not alive(groups), 5), alive(groups)
    resumed = run_folder.resume_point()
    assert resumed is not None
    assert resumed.step == len(read_metrics(run_folder)) > 2


@pytest.mark.slow
# A killed vLLM is restarted: tests/runs/test_replicas.py and tests/runs/test_faults.py.
@pytest.mark.parametrize("title", ["rl.rollouts", "rl.trainer"])
def test_a_killed_process_ends_the_run_and_is_named(title, launcher):
    with started(launcher, f"without-{title[-8:].lower()}", *SCRIPTED) as (process, groups):
        (victim, *_) = [p for p in _members(groups) if title in _title(p)]
        os.kill(victim, signal.SIGKILL)
        screen, _ = process.communicate(timeout=60)
        assert process.returncode == 1, screen
        assert title.removeprefix("rl.") in screen.rpartition("the run failed")[2]
        assert "Traceback" not in screen.partition("The end of")[0]
        assert wait_for(lambda: not alive(groups), 5), alive(groups)


@pytest.mark.slow
def test_an_environment_that_never_scores_stops_the_run_with_its_own_error(launcher):
    (launcher.output / "broken.py").write_text(BROKEN)
    result = launcher.run("broken", *BROKEN_RUN, *SCRIPTED, warm=COLD)
    assert result.status == 1
    assert "raised KeyError: 'no such answer' (broken.py:10)" in result.screen
    assert "none of the last 128 rollouts could be scored" in result.screen
    assert "Traceback" not in result.screen


@pytest.mark.slow
def test_a_server_that_cannot_start_is_quoted(launcher):
    wrong = "+inference.args.kv_cache_dtype=none"
    result = launcher.run("no-server", "max_steps=2", wrong, warm=COLD)
    assert result.status == 1
    assert "inference ended with status" in result.screen
    assert "argument --kv-cache-dtype: invalid choice: 'none'" in result.screen
    assert "no step was done: nothing is lost, and run_name can be used again" in result.screen


def _members(groups):
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                with open(f"/proc/{folder}/stat") as stat:
                    group = int(stat.read().rpartition(")")[2].split()[2])
            except OSError:
                continue
            if group in groups:
                yield int(folder)


def _title(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/comm") as name:
        return line.read().replace(b"\0", b" ").decode() + name.read()
