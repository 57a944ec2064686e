"""Measure how long compare_losses.py takes for ten losses on a recorded batch, without a model.

    python -m benchmarks.comparing

It computes the gradient of each loss with made-up outputs of two updates, and compares it with the
gradient of the run. One line, the median of five repeats:

    {"tokens": ..., "losses": 10, "reading": ..., "seconds": ..., "per_100k": ...}

`reading` is the time to read the record once, `per_100k` the time of all losses for 100,000 tokens.
"""

import json
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks._composing import seconds
from lab.losses.arms import Arm, arms_of
from lab.losses.command import difference
from lab.losses.recorded import RecordedBatch, recorded_batches
from tests.support.recorded_run import STEP, record_run

LOSSES = "cispo,grpo,dr_grpo,dapo,ppo_clip,gspo,sapo,masked_is,dppo,top_entropy"
NUM_GROUPS = 400


def compare(arms: list[Arm], batches: list[RecordedBatch]) -> None:
    """Compute and compare the gradients of all arms."""
    recorded = torch.cat([batch.grads for batch in batches])
    for arm in arms:
        grads = [arm.gradient(batch, 0.0)[1] for batch in batches]
        difference(recorded, torch.cat(grads))


def main() -> None:
    """Measure, then print one line."""
    batches: list[RecordedBatch] = []
    with tempfile.TemporaryDirectory() as name:
        folder = record_run(Path(name), num_groups=NUM_GROUPS)
        reading = seconds(lambda: batches.extend(recorded_batches(folder, STEP)))
        arms = arms_of(folder, [f"loss={LOSSES}"])[1:]
        took = [seconds(lambda: compare(arms, batches)) for _ in range(6)][1:]
    tokens = sum(len(batch.grads) for batch in batches)
    line = {
        "tokens": tokens,
        "losses": len(arms),
        "reading": round(reading, 2),
        "seconds": round(statistics.median(took), 2),
        "per_100k": round(statistics.median(took) * 1e5 / tokens, 2),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
