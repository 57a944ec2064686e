"""Does every pair of choices from any two groups train, or does the check refuse it?

    python -m benchmarks.compositions --refused  prints what the check refuses, with the messages
    python -m benchmarks.compositions            trains what the check allows, one JSON line a run

A covering set of runs (benchmarks/_covering.py) is trained for three steps each on a tiny policy,
with a run's own learner: DeepSpeed engine, objective, plan, buffer and credit. vLLM is left out,
because this process samples the policy itself.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._choices import ENVIRONMENTS, STEPS, Compositions, table
from benchmarks._covering import Assignment
from benchmarks._playing import Playground
from rl.dry_call.learn import run_with_facts
from rl.learner.learner import Learner
from rl.learner.ranks import Ranks
from rl.runtime.folder import RunFolder
from rl.weights.fingerprint import fingerprint


def train(config: dict[str, Any], playground: Playground, ranks: Ranks) -> list[dict[str, float]]:
    """Take three steps; return the metrics of each.

    Raises:
        AssertionError: a step was skipped, or no weight changed in three steps.

    """
    run = run_with_facts(config)
    if "path" in run.reference:
        run = run.with_values({"reference.path": str(playground.teacher(run.env))})
    if "path" in run.sampler:
        run = run.with_values({"sampler.path": str(playground.transcripts(run.env))})
    run_folder = RunFolder(playground.folder / "run")
    run_folder.path.mkdir(exist_ok=True)
    run_folder.set_model(playground.model(run.env))
    learner = Learner(run, run_folder, ranks)
    before = fingerprint(learner.policy.weights())
    stats = [learner.update(playground.batch(run, learner, step)) for step in range(STEPS)]
    assert not any(one["train/skipped"] for one in stats), "a gradient was not finite"
    assert fingerprint(learner.policy.weights()) != before, "no weight changed"
    del learner
    gc.collect()
    return stats


def train_all(compositions: Compositions, rows: Sequence[tuple[int, Assignment]]) -> int:
    """Train these numbered rows, printing a line for each; return how many failed."""
    failed = 0
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)  # one thread is faster for matrices this small
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks.join(Path(name) / "rendezvous", 60.0)
        playground = Playground(Path(name), ranks)
        for number, row in rows:
            began = time.monotonic()
            environment = ENVIRONMENTS[number % len(ENVIRONMENTS)]
            line: dict[str, Any] = {"run": number, "env": environment, **row}
            try:
                stats = train(compositions.trained(row, environment), playground, ranks)
                line |= {"loss": [round(one["train/loss"], 4) for one in stats]}
            except Exception as error:  # noqa: BLE001 the other runs still train
                line |= {"failed": f"{type(error).__name__}: {error}"}
                failed += 1
            print(json.dumps({**line, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    return failed


def main() -> None:
    """Print the refused combinations, or train; exit with status 1 if a run fails."""
    parser = argparse.ArgumentParser(description="Does every pair of choices train?")
    parser.add_argument("--refused", action="store_true", help="print what the check refuses")
    refused, compositions = parser.parse_args().refused, Compositions()
    if refused:
        print(table(compositions.whole), end="")
        return
    if failed := train_all(compositions, list(enumerate(compositions.trainable.rows))):
        sys.exit(f"{failed} runs failed")


if __name__ == "__main__":
    main()
