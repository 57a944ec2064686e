"""What the token record costs: an update that is recorded beside one that is not, and bytes.

    python -m benchmarks.recording [--env wiki-search] [--rows 256] [--repeats 5]

The policy of an environment, rows of what its expert says, all of them recorded, one thread:

    {"tokens": ..., "seconds": ..., "of_update": ..., "sampled_seconds": ...,
     "bytes_per_token": ...}

`tokens` are those that the policy chose. `of_update` is the processor time of a recorded update,
its file included, as a part of the same update unrecorded; rounds take turns, and the median of
their ratios counts. `sampled_seconds` is what the rollouts process spends on its file, in a thread.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._composing import compose
from benchmarks.updating import batch_of, expert_rows, ratio
from envs.episode import Example, StopReason
from rl.config.build import build
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.ranks import Ranks
from rl.records import Credit, Group, RankBatch, Rollout
from rl.rollouts.token_record import TokenRecord
from rl.run.folder import RunFolder
from rl.trainer.token_record import StepRecord


def cpu_seconds(work: Callable[[], object]) -> float:
    """What this process computed: a few per cent are less than what others on the machine cost."""
    began = time.process_time()
    work()
    return time.process_time() - began


def group_of(rows: list[Any]) -> Group:
    """One group of a rollout for each row."""
    rollouts = tuple(Rollout((row,), [], 0.0, {}, StopReason.STOP, 1, 0.0) for row in rows)
    return Group(0, Example(0, "none", []), 0, rollouts, (Credit(0.0, (0.0,)),) * len(rows))


def recorded_update(learner: Learner, batch: RankBatch, run_folder: RunFolder) -> None:
    """What a rank does with a batch that is recorded."""
    record = StepRecord(batch)
    learner.update(batch, record.observe)
    record.write(run_folder, 0)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="wiki-search")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    run = Run(**compose([f"env={arguments.env}", "trainer.num_threads=1"]))
    with tempfile.TemporaryDirectory() as name:
        run_folder = RunFolder(Path(name))
        model = build(run.model)()
        folder = model.prepare(run_folder.built_model)
        run_folder.set_model(folder)
        learner = Learner(run, run_folder, Ranks.join(run_folder.path / "rendezvous", 60.0))
        rows = expert_rows(run, model, folder, arguments.rows)
        group, everything = group_of(rows), TokenRecord(num_groups=None)
        batch = batch_of(run, rows, 0.0)
        recorded = replace(batch, record_ids=everything.ids([group], [group]))
        off, on, sampled = ([] for _ in range(3))
        for _ in range(arguments.repeats + 1):
            off.append(cpu_seconds(lambda: learner.update(batch)))
            on.append(cpu_seconds(lambda: recorded_update(learner, recorded, run_folder)))
            sampled.append(cpu_seconds(lambda: everything.write(run_folder, 0, [group])))
        size = sum(path.stat().st_size for path in run_folder.tokens.iterdir())
    tokens = sum(row.num_completion for row in rows)
    line = {
        "tokens": tokens,
        "seconds": round(statistics.median(on[1:]), 3),  # the first round warms up
        "of_update": round(ratio(on[1:], off[1:]), 3),
        "sampled_seconds": round(statistics.median(sampled[1:]), 4),
        "bytes_per_token": round(size / tokens, 1),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
