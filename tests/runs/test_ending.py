"""After every kind of end no process is left, and a few lines on the screen say the reason."""

import os
import pickle
import signal
from contextlib import contextmanager

import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from tests.support.launching import alive, below, groups_below, stop, wait_for
from tests.support.unpickled import Written

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
    "+env.reward_weights.right=1.0", "model.warm_start=null", "max_steps=3",
]  # fmt: skip


@contextmanager
def started(launcher, name):
    """Yield a run that has done its first step, and the process groups of all its processes."""
    process = launcher.start(name, "max_steps=500")
    metrics = launcher.output / name / "metrics.jsonl"
    try:
        assert wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 400)
        groups = groups_below(process.pid)
        assert len(alive(groups)) >= 5  # reaper, rollouts, trainer, and vLLM's two
        yield process, groups
    finally:
        stop(process)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_five_seconds_after_the_supervisor_got(sent, launcher):
    with started(launcher, f"killed-{sent.name}") as (process, groups):
        os.kill(process.pid, sent)
        assert wait_for(lambda: not alive(groups), 5), alive(groups)
        assert process.wait(timeout=5) == (-sent if sent == signal.SIGKILL else 130)


def test_term_to_every_process_saves_a_checkpoint_and_prints_the_resume_command(launcher):
    with started(launcher, "preempted") as (process, groups):
        for pid in [*below(process.pid), process.pid]:  # vLLM ends before the supervisor
            os.kill(pid, signal.SIGTERM)
        screen, _ = process.communicate(timeout=60)
        assert process.returncode == 0, screen
        assert wait_for(lambda: not alive(groups), 5), alive(groups)
    run_folder = RunFolder(launcher.output / "preempted")
    assert run_folder.num_saved_steps() == len(read_metrics(run_folder)) > 0
    assert "ended before max_steps=500: stopped, as asked" in screen
    assert "run_name=preempted resume=true" in screen
    assert not run_folder.private.path.exists()


def test_two_ranks_stop_after_the_same_step_and_load_no_code_from_the_checkpoint(launcher):
    demonstrations = ["loss=sft", "sampler=demonstrations", "model.warm_start=null"]
    sizes = ["trainer.ranks=2", "max_steps=5000", "trainer.checkpoint_every=0"]
    process = launcher.start("two-ranks", *demonstrations, *sizes, warm=[])
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
    code_ran = launcher.output / "code ran"
    for file in (resumed.folder / "deepspeed").iterdir():
        file.write_bytes(pickle.dumps(Written(code_ran)))
    result = launcher.run("two-ranks", *demonstrations, *sizes, "resume=true", warm=[])
    assert (result.status, code_ran.exists()) == (1, False)
    assert "is not loaded, because it may contain code" in result.screen


# A killed vLLM is restarted: tests/runs/test_replicas.py and tests/runs/test_faults.py.
@pytest.mark.parametrize("title", ["rl.rollouts", "rl.trainer"])
def test_a_killed_process_ends_the_run_and_is_named(title, launcher):
    with started(launcher, f"without-{title[-8:].lower()}") as (process, groups):
        (victim, *_) = [p for p in _members(groups) if title in _title(p)]
        os.kill(victim, signal.SIGKILL)
        screen, _ = process.communicate(timeout=60)
        assert process.returncode == 1, screen
        assert title.removeprefix("rl.") in screen.rpartition("the run failed")[2]
        assert "Traceback" not in screen.partition("The end of")[0]
        assert wait_for(lambda: not alive(groups), 5), alive(groups)


def test_an_environment_that_never_scores_stops_the_run_with_its_own_error(launcher):
    (launcher.output / "broken.py").write_text(BROKEN)
    result = launcher.run("broken", *BROKEN_RUN)
    assert result.status == 1
    assert "raised KeyError: 'no such answer' (broken.py:10)" in result.screen
    assert "none of the last 128 rollouts could be scored" in result.screen
    assert "Traceback" not in result.screen


def test_a_server_that_cannot_start_is_quoted(launcher):
    result = launcher.run("no-server", "max_steps=2", "+inference.args.kv_cache_dtype=none")
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
