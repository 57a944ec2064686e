"""What long rows cost a training step: memory beside a formula, and time beside short rows.

    python -m benchmarks.lengths [--lengths 512,4096,16384] [--model num_layers=8] [--compile]

The tiny policy, not warm-started; every step trains on the same number of tokens, those of one
longest row, in one micro-batch, so what does not depend on a row's length costs the same. One JSON
line for each length, without and with gradient checkpointing, each in a process of its own:

    {"length": 4096, "checkpointing": false, "MiB": ..., "of_formula": ..., "tokens_per_s": ...,
     "of_shortest": ...}

`MiB` is what a second step needs at its peak beyond what the first, of two short rows, has left
resident; `of_formula` as a part of `activations` below; `of_shortest` tokens a second as a part of
those of the shortest rows.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
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
from rl.records import RankBatch, Sequence
from rl.rollouts.plan import WeightedRow, plan
from rl.run.folder import RunFolder

_MIB = 2**20


def activations(run: Run, tokens: int, vocabulary: int) -> int:
    """Bytes that a forward and a backward pass over `tokens` hold at their peak.

    Linear in the tokens: attention keeps no matrix of tokens by tokens. Per token and layer, in
    numbers of the model's dtype:

        two norms, twice each (input, and normalised before its weight)   4 hidden   (in float32)
        queries, keys, values before and after their norms and rotation, what attention gives, and
        the inputs of the two projections around it
        gate, up, what the activation makes of the gate, and their product   4 inner
    """
    model, bytes_each = run.model, 2 if run.model["dtype"] == "bfloat16" else 4
    hidden, layers = model["hidden_size"], model["num_layers"]
    heads = model["num_heads"] * model["head_dim"]
    keys = model["num_kv_heads"] * model["head_dim"]
    inner = 4 * hidden
    attention = 4 * heads * bytes_each + 6 * keys * bytes_each + 8 * (heads + keys)
    layer = 4 * hidden * bytes_each + 16 * hidden + attention + 4 * inner * bytes_each
    kept = hidden * bytes_each * layers + layer if run.trainer["gradient_checkpointing"] else 0
    chunk = min(tokens, run.trainer["logprob_chunk"])
    logits = 4 * 4 * chunk * vocabulary  # logits, their exponentials and slopes, in float32
    return tokens * (kept or layers * layer) + logits


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
    """Measure one length in this process: [bytes, bytes by formula, tokens a second]."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    run = Run(**compose(overrides))
    with tempfile.TemporaryDirectory() as name:
        run_folder = RunFolder(Path(name))
        run_folder.set_model(build(run.model)().prepare(run_folder.built_model))
        ranks = Ranks.join(run_folder.path / "rendezvous", 60.0)
        learner = Learner(run, run_folder, ranks)
        learner.update(batch_of(rows_of(64, 128), tokens))  # the optimizer's state is there now
        batch = batch_of(rows_of(length, tokens), tokens)
        used, took = peak_of(learner, batch)
        times = [seconds(lambda: learner.update(batch)) for _ in range(repeats)] or [took]
        formula = activations(run, tokens, learner.policy.vocabulary)
        results.put((used, formula, tokens / statistics.median(times)))


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
            used, formula, rate = results.get()
            process.join()
            fastest = fastest or rate
            line = {
                "length": length,
                "checkpointing": checkpointing,
                "MiB": round(used / _MIB),
                "of_formula": round(used / formula, 2),
                "tokens_per_s": round(rate),
                "of_shortest": round(rate / fastest, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
