"""Does every pair of choices from any two groups train, or does the check refuse it?

    python -m benchmarks.compositions --refused  prints what the check refuses, with the messages
    python -m benchmarks.compositions            trains what the check allows, one JSON line a run

A covering set of compositions (benchmarks/_covering.py) is trained by train.py, for three steps
each with a tiny policy: one to two hours. A scripted server (tests/support/scripted_vllm.py) takes
vLLM's place. The same command continues what was interrupted; delete outputs/compositions to start
again, for example after a change of the code.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._choices import Compositions, table
from benchmarks._covering import Assignment
from envs.user_code import ROOT
from rl.config.build import build
from rl.model.loading import load_model
from tests.support.composing import composed
from tests.support.equal_runs import Run

STEPS, AT_ONCE, FOLDER = 3, 2, ROOT / "outputs" / "compositions"
TRANSCRIPTS = ROOT / "tests/support/viewed/rollouts/step_000000.jsonl"
SMALL = [
    *(f"max_steps={STEPS}", "batch_size=16", "optim.warmup_steps=0", "env.num_train=300"),
    "env.reward_weights.similarity=1",  # so that the scripted answers earn different rewards
    "trainer.wait_timeout=400",  # above the time limit of a rollout
]


def train(teacher: Path, name: str, choices: Sequence[str]) -> str:
    """Train one composition; print a line, and return the problem or an empty string."""
    began = time.monotonic()
    given = {"reference=model": teacher, "sampler=transcripts": TRANSCRIPTS}
    paths = [
        f"{key.partition('=')[0]}.path={path}" for key, path in given.items() if key in choices
    ]
    run = Run(ROOT, name, [*SMALL, *choices, *paths], FOLDER)
    if run.folder.exists() and not problem_of(run.metrics):
        return ""  # an earlier start trained it
    shutil.rmtree(run.folder, ignore_errors=True)
    process = run.start()
    screen = process.communicate()[0]
    problem = screen[-3000:] if process.returncode else problem_of(run.metrics)
    line: dict[str, Any] = {"run": name, "choices": choices}
    line |= {"failed": problem} if problem else {}
    print(json.dumps({**line, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    return problem


def problem_of(metrics: Sequence[dict[str, Any]]) -> str:
    """Return why the steps of a run that ended trained nothing, or an empty string."""
    steps = [step for step in metrics if "train/loss" in step]
    if len(steps) < STEPS or any(step["train/skipped"] for step in steps):
        return "a step is missing, or its gradient was not finite"
    return "" if any(step["train/grad_norm"] for step in steps) else "no gradient"


def train_all(compositions: Compositions, rows: Sequence[Assignment]) -> int:
    """Train these rows, printing a line for each; return how many failed."""
    made = build(composed("model.warm_start=null")["model"])().prepare(FOLDER / "teacher")
    load_model(made, torch.float32, 1).save_pretrained(made)
    names = [f"run{number}" for number in range(len(rows))]
    choices = [compositions.overrides(row) for row in rows]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(map(bool, pool.map(partial(train, made), names, choices)))


def main() -> None:
    """Print the refused combinations, or train; exit with status 1 if a run fails."""
    parser = argparse.ArgumentParser(description="Does every pair of choices train?")
    parser.add_argument("--refused", action="store_true", help="print what the check refuses")
    refused, compositions = parser.parse_args().refused, Compositions()
    if refused:
        print(table(compositions.whole), end="")
        return
    if failed := train_all(compositions, compositions.trainable.rows):
        sys.exit(f"{failed} runs failed")


if __name__ == "__main__":
    main()
