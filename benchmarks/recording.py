"""Measure what the token record adds to the processor time of an update, and its size.

    python -m benchmarks.recording [--env wiki-search] [--rows 256] [--repeats 5]

Rows are those of the environment's expert, all recorded, one thread. One line:

    {"tokens": ..., "seconds": ..., "of_update": ..., "sampled_seconds": ..., "bytes_per_token": 10}

`tokens` counts those that the policy chose. `of_update` divides the processor time of a recorded
update, its file included, by that of an update without a record (median of ratios).
`sampled_seconds` is the time in which a thread of the rollouts process writes its file.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.updating import batch_of, learning, parsed, ratio
from envs.episode import Example, StopReason
from rl.learner.learner import Learner
from rl.records import Credit, Group, RankBatch, Rollout
from rl.rollouts.sampled_tokens import TokenRecord
from rl.runtime.folder import RunFolder
from rl.trainer.trained_tokens import StepRecord


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return processor seconds, because other processes disturb the wall clock by some percent."""
    began = time.process_time()
    work()
    return time.process_time() - began


def group_of(rows: list[Any]) -> Group:
    """Return one group with a rollout for each row."""
    rollouts = tuple(Rollout((row,), [], 0.0, {}, StopReason.STOP, 1, 0.0) for row in rows)
    return Group(0, Example(0, "none", []), 0, rollouts, (Credit(0.0, (0.0,)),) * len(rows))


def recorded_update(learner: Learner, batch: RankBatch, run_folder: RunFolder) -> None:
    """Update and record a batch as a rank does."""
    record = StepRecord(batch)
    learner.update(batch, record.observe)
    record.write(run_folder, 0)


def main() -> None:
    """Measure, then print one line."""
    arguments = parsed()
    with learning(arguments) as (run, run_folder, learner, rows):
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
