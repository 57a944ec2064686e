"""What long rows cost a training step: memory beside the estimate, and time beside short rows.

    python -m benchmarks.lengths [--lengths 512,4096,16384] [--model num_layers=8] [--compile]

The tiny policy, not warm-started; every step trains on the same number of tokens, those of one
longest row, in one micro-batch, so what does not depend on a row's length costs the same. One JSON
line for each length, without and with gradient checkpointing, each in a process of its own:

    {"length": 4096, "checkpointing": false, "MiB": ..., "of_estimate": ..., "tokens_per_s": ...,
     "of_shortest": ...}

`MiB` is what a second step needs at its peak beyond what the first, of two short rows, has left
resident; `of_estimate` as a part of what the run would print of activations and logits before it
starts; `of_shortest` tokens a second as a part of those of the shortest rows.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks._composing import compose
from benchmarks._timing import seconds
from rl.config.build import build
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.ranks import Ranks
from rl.model.shape import shape_of
from rl.placement.trainer_memory import trainer_need
from rl.records import RankBatch, Sequence
from rl.rollouts.plan import WeightedRow, plan
from rl.run.folder import RunFolder

_MIB = 2**20


def estimate(run: Run, folder: Path) -> float:
    """Bytes of activations and logits, as the run itself would print them (rl/placement)."""
    shape = shape_of(folder)
    assert shape
    need = trainer_need(asdict(run), shape, ranks=1, first=True, on_gpu=False)
    return need.host["activations"] + need.host["logits"]


def rows_of(length: int, tokens: int) -> list[WeightedRow]:
    """As many rows of that length as make up the tokens; the second half of each is trained."""
    rng = np.random.default_rng(0)
    count = max(tokens // length, 1)
    mask = np.arange(length) >= length // 2
    rows = []
    for i in range(count):
        row = Sequence(
            token_ids=rng.integers(32, 127, length).astype(np.int32),
            completion_mask=mask,
            rollout_logprobs=(mask * -0.5).astype(np.float32),
            token_versions=np.where(mask, 0, -1).astype(np.int32),
            turns=np.where(mask, 0, -1).astype(np.int32),
        )
        rows.append(WeightedRow(row, Random(i).choice((-1.0, 1.0)), 2 / (length * count), i))
    return rows


def batch_of(rows: list[WeightedRow], budget: int) -> RankBatch:
    """The rows as one step's batch."""
    (share,) = plan(rows, step=0, ranks=1, tokens_per_micro_batch=budget, metrics={})
    return share


def resident(what: str) -> int:
    """Bytes of memory that this process holds (VmRSS), or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def peak_of(learner: Learner, batch: RankBatch) -> tuple[int, float]:
    """Bytes beyond what is resident now, and seconds, of one update."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is
    before = resident("VmRSS")
    took = seconds(lambda: learner.update(batch))
    return resident("VmHWM") - before, took


def measure(overrides: list[str], length: int, tokens: int, repeats: int, results: Any) -> None:
    """Measure one length in this process: [bytes, as estimated, tokens a second]."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    run = Run(**compose(overrides))
    with tempfile.TemporaryDirectory() as name:
        run_folder = RunFolder(Path(name))
        folder = build(run.model)().prepare(run_folder.built_model)
        run_folder.set_model(folder)
        ranks = Ranks.join(run_folder.path / "rendezvous", 60.0)
        learner = Learner(run, run_folder, ranks)
        learner.update(batch_of(rows_of(64, 128), tokens))  # the optimizer's state is there now
        batch = batch_of(rows_of(length, tokens), tokens)
        used, took = peak_of(learner, batch)
        times = [seconds(lambda: learner.update(batch)) for _ in range(repeats)] or [took]
        results.put((used, estimate(run, folder), tokens / statistics.median(times)))


def overrides_of(arguments: argparse.Namespace, longest: int, checkpointing: bool) -> list[str]:
    """What the command line would say."""
    return [
        *("env=reverse-text", "model.warm_start=null", f"model.max_seq_len={longest}"),
        *(f"model.{pair}" for pair in arguments.model.split(",") if pair),
        f"trainer.tokens_per_micro_batch={longest}",
        f"trainer.gradient_checkpointing={str(checkpointing).lower()}",
        f"trainer.compile={str(arguments.compile).lower()}",
        "sampler.max_tokens=32",
    ]


def main() -> None:
    """Measure, and print as it goes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="512,4096,16384")
    parser.add_argument("--tokens", type=int, help="of a step; those of the longest row")
    parser.add_argument("--model", default="")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    tokens = arguments.tokens or max(lengths)
    apart = multiprocessing.get_context("spawn")
    for checkpointing in (False, True):
        fastest = 0.0
        for length in lengths:
            results = apart.Queue()
            overrides = overrides_of(arguments, tokens, checkpointing)
            given = (overrides, length, tokens, arguments.repeats, results)
            process = apart.Process(target=measure, args=given)
            process.start()
            used, estimated, rate = results.get()
            process.join()
            fastest = fastest or rate
            line = {
                "length": length,
                "checkpointing": checkpointing,
                "MiB": round(used / _MIB),
                "of_estimate": round(used / estimated, 2),
                "tokens_per_s": round(rate),
                "of_shortest": round(rate / fastest, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
