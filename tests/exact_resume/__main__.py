"""Whether a killed and resumed run equals the uninterrupted one: python -m tests.exact_resume.

Run a pairwise covering set of compositions and print a line for each; exit with status 1 at a
difference. With --only 0,3 only these compositions.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._covering import Assignment, Covering
from tests.support.composing import REPO
from tests.support.equal_runs import SYNC, Record, Run, first_difference
from tests.support.launching import alive, groups_below, wait_for

SCHEDULES = [
    "sampler.temperature={_target_:rl.schedule.linear,start:1.0,end:0.5,steps:5}",
    "optim.schedule=cosine",
]
LORA = ["adapter=lora", "adapter.dropout=0.1", "optim.learning_rate=5e-3"]
REFRESHED = ["kl=k3", "kl.beta=0.05", "reference.refresh_every=2"]
CHOICES: dict[str, dict[str, list[str]]] = {
    "ranks": {"1": [], "2": ["trainer.ranks=2"]},
    "deepspeed": {f"zero{n}": [f"deepspeed=zero{n}"] for n in (0, 2, 3)},
    "adapter": {"none": [], "lora": LORA},
    "critic": {"none": [], "value": ["loss=ppo"]},
    "kl": {"none": [], "adaptive": ["kl=adaptive"], "refreshed": REFRESHED},
    "order": {name: [f"order={name}"] for name in ("shuffled", "sequential", "difficulty")},
    "buffer": {name: [f"buffer={name}"] for name in ("fifo", "difficulty", "replay")},
    "env": {"one": [], "mixture": ["env=mixture"]},
    "schedule": {"none": [], "some": SCHEDULES},
}
# An environment whose pool grows, and an advantage with a state. Groups are played one at a time,
# because the advantage depends on the order in which they end.
MEMORY = [
    *("env._target_=remembering.GrowingReversal", "env.num_train=4"),
    *("env.reward_weights={exact: 1.0, similarity: 1.0}", "sampler.max_concurrent=4"),
    *("~advantage", "+advantage._target_=remembering.AboveEarlier"),
]
# The last composition. It is not part of the covering set, and its run is killed.
REMEMBERING = {"buffer": "replay", "memory": "pool and advantage", "schedule": "some"}
STEPS, EVERY = 6, 2
SMALL = [f"max_steps={STEPS}", "batch_size=16", "group_size=4", "entropy_bonus=0.01"]
SMALL += [f"trainer.checkpoint_every={EVERY}", "trainer.keep_checkpoints=9"]
# Choices that the check refuses together. Demonstrations are left out: they need another loss.
CONFLICT = {("adapter", "lora"), ("kl", "refreshed")}


def rows() -> list[Assignment]:
    """Return compositions in which every pair of choices of two groups occurs, and REMEMBERING."""

    def problems(row: Assignment) -> list[str]:
        return ["an adapter freezes the base model"] if set(row.items()) >= CONFLICT else []

    covering = Covering({name: list(of) for name, of in CHOICES.items()}, problems)
    return [*covering.fill(seed=1).rows, REMEMBERING]


def overrides_of(row: Assignment) -> list[str]:
    """Return the overrides of a composition. The loss comes first, because it brings choices."""
    named = sorted(row.items(), key=lambda item: item[0] != "critic")
    choices = {**CHOICES, "memory": {"pool and advantage": MEMORY}}
    return [*SYNC, *SMALL, *(each for group, name in named for each in choices[group][name])]


def difference(number: int, row: Assignment, output: Path) -> str:
    """Run a composition whole, and interrupted and resumed; return the first difference."""
    whole = Run(REPO, "run", overrides_of(row), output / "whole")
    if problem := _failed(whole):
        return problem
    saved = EVERY * (1 + number % (STEPS // EVERY - 1))  # the resumed run has so many steps
    resumed = Run(REPO, "run", [*whole.overrides], output / "resumed")
    if row == REMEMBERING:
        saved = EVERY
        if problem := _kill(resumed, saved + 1):
            return problem
    else:
        shutil.copytree(whole.folder, resumed.folder)  # with the later steps, as after a kill
        for checkpoint in (resumed.folder / "checkpoints").glob("step_*"):
            if int(checkpoint.name.removeprefix("step_")) > saved:
                shutil.rmtree(checkpoint)
    resumed.overrides.append("resume=true")
    if problem := _failed(resumed):
        return f"resumed after {saved} steps: {problem}"
    if found := first_difference(_records(whole), _records(resumed)):
        return f"resumed after {saved} steps: {found[:600]}"
    if len({json.dumps(marks) for marks in whole.checkpoints.values()}) < STEPS // EVERY:
        return "equal, but the weights do not change, so the comparison is useless"
    return ""


def _kill(run: Run, num_steps: int) -> str:
    """Start a run and kill it after so many steps; return a problem, or an empty string."""
    process, lines, groups = run.start(), run.folder / "metrics.jsonl", set[int]()
    while process.poll() is None:
        if lines.exists() and lines.read_bytes().count(b"\n") >= num_steps:
            process.kill()
        groups |= groups_below(process.pid) - {os.getpgrp()}
        time.sleep(0.02)
    if not wait_for(lambda: not alive(groups), 10):
        return f"the killed run left {alive(groups)}"
    saved, done = len(run.checkpoints) * EVERY, len(run.metrics)
    if 0 < saved < done and process.returncode == -signal.SIGKILL:
        return ""
    return f"not killed between two checkpoints: {done} steps, {saved} saved"


def _failed(run: Run) -> str:
    """Return the end of the screen if the run fails, or an empty string."""
    process = run.start()
    screen, _ = process.communicate(timeout=600)
    return f"status {process.returncode}: {screen[-2000:]}" if process.returncode else ""


def _records(run: Run) -> Iterator[Record]:
    """Yield all that must be equal: metrics, rollouts, evaluations and weights, without times.

    A rejected group is written with the next batch, so its file and its line depend on the time at
    which it finishes. Its rollouts are yielded last, in the order of their ids.
    """
    rejected: list[Record] = []
    for where, record in run.records():
        if where.startswith("rollouts/") and not record["used"]:
            rejected.append((record["id"], record))
        elif not where.startswith("push of"):
            yield where, record
    yield from sorted(rejected, key=lambda item: item[0])


def main() -> int:
    """Compare the chosen compositions; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="numbers of compositions")
    only = [int(number) for number in parser.parse_args().only.split(",") if number]
    failed = 0
    for number, row in enumerate(rows()):
        if only and number not in only:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="resume-") as output:
            problem = difference(number, row, Path(output))
        failed += bool(problem)
        what = " ".join(f"{group}={choice}" for group, choice in sorted(row.items()))
        seconds = time.monotonic() - began
        print(f"{number:2} {problem or 'equal'}  [{what}] {seconds:.0f} s", flush=True)  # noqa: T201
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
