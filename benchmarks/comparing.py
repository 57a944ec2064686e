"""Measure how long compare_losses.py takes for ten losses on a recorded batch, without a model.

    python -m benchmarks.comparing

It computes the gradient of each loss with made-up outputs of two updates, and compares it with the
gradient of the run. `reading` is the time to read the record once, `per_100k` the time of all
losses for 100,000 tokens.
"""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks._measuring import rounds, say, seconds
from lab.losses.arms import arms_of
from lab.losses.command import difference
from lab.losses.recorded import RecordedBatch, recorded_batches
from tests.support.recorded_run import STEP, record_run

LOSSES = "cispo,grpo,dr_grpo,dapo,ppo_clip,gspo,sapo,masked_is,dppo,top_entropy"


def main() -> None:
    """Print the medians of five repeats."""
    batches: list[RecordedBatch] = []
    with tempfile.TemporaryDirectory() as name:
        folder = record_run(Path(name), num_groups=400)
        reading = seconds(lambda: batches.extend(recorded_batches(folder, STEP)))
        arms = arms_of(folder, [f"loss={LOSSES}"])[1:]

        def compare() -> None:
            recorded = torch.cat([batch.grads for batch in batches])
            for arm in arms:
                grads = [arm.gradient(batch, 0.0)[1] for batch in batches]
                difference(recorded, torch.cat(grads))

        took = statistics.median(rounds({"compare": compare}, 5)["compare"])
    tokens = sum(len(batch.grads) for batch in batches)
    per_100k = took * 1e5 / tokens
    say(tokens=tokens, losses=len(arms), reading=reading, seconds=took, per_100k=per_100k)


if __name__ == "__main__":
    main()
