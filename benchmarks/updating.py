"""What a training step costs, beside the shortest plain torch that computes the same gradient.

    python -m benchmarks.updating [--env wiki-search] [--rows 256] [--repeats 5]

The policy of an environment, rows of what its expert says, one thread, bfloat16. One JSON
line for each share of rows without advantage:

    {"idle": 0.44, "seconds": ..., "tokens_per_s": ..., "of_plain": ..., "of_all": ...}

`of_plain` is the time of a whole update (objective, DeepSpeed, clipping, AdamW, metrics) as a part
of what plain torch takes: all logits at once, backward, AdamW; `of_all` as a part of our own with
an advantage in every row. Rounds take turns, and the median of their ratios counts.
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks._composing import compose
from benchmarks._timing import seconds
from rl.config.build import build
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.learner.ranks import Ranks
from rl.model.loading import load_model
from rl.model.tokenizer import load_renderer
from rl.records import RankBatch
from rl.rollouts.plan import WeightedRow, plan
from rl.run.folder import RunFolder
from rl.sampling.demonstrations import tokenize

IDLE = (0.0, 0.25, 0.44, 0.75)  # 0.44: wiki-search at version 30 (docs/experiments.md)


class Plain:
    """What a short script would do with the same micro-batches."""

    def __init__(self, folder: Path, rate: float) -> None:
        self._model = load_model(folder, torch.bfloat16, 0)
        self._model.set_attn_implementation("sdpa")  # as transformers has it
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate)

    def update(self, batches: list[Batch]) -> None:
        """One step of REINFORCE with an importance weight: about what CISPO computes."""
        for batch in batches:
            logits = self._model(input_ids=batch.token_ids, use_cache=False).logits[:, :-1].float()
            chosen = batch.token_ids[:, 1:, None]
            logprobs = logits.log_softmax(-1).gather(-1, chosen)[..., 0][batch.mask[:, 1:]]
            ratio = (logprobs.detach() - batch.rollout_logprobs).exp().clamp(max=5.0)
            loss: Tensor = -(batch.token_weights * ratio * batch.advantages * logprobs).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def expert_rows(run: Run, model: Any, folder: Path, count: int) -> list[Any]:
    """Training rows of what the environment's expert says."""
    env = build(run.env)()
    renderer = load_renderer(folder, model.renderer)
    conversations = islice(env.demonstrations(Random(0)), count)
    return [tokenize(renderer, messages, run.max_seq_len)[0] for messages in conversations]


def batch_of(run: Run, rows: list[Any], idle: float) -> RankBatch:
    """All rows as one step's batch; that share of them has no advantage."""
    rng = Random(1)
    zero = set(rng.sample(range(len(rows)), round(idle * len(rows))))
    weight = 1 / sum(row.num_completion for row in rows)
    weighted = [
        WeightedRow(
            replace(row, rollout_logprobs=row.completion_mask * -0.5),
            0.0 if i in zero else rng.choice((-1.0, 1.0)),
            weight,
            i,
        )
        for i, row in enumerate(rows)
    ]
    budget = run.trainer["tokens_per_micro_batch"]
    (share,) = plan(weighted, step=0, ranks=1, tokens_per_micro_batch=budget, metrics={})
    return share


def main() -> None:
    """Measure, and print as it goes."""
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
        ranks = Ranks.join(run_folder.path / "rendezvous", 60.0)
        learner, plain = Learner(run, run_folder, ranks), Plain(folder, run.optim["learning_rate"])
        rows = expert_rows(run, model, folder, arguments.rows)
        batches = {idle: batch_of(run, rows, idle) for idle in IDLE}
        same = [Batch.of(micro, ranks.device, 0) for micro in batches[0.0].micro_batches]
        took: dict[float | None, list[float]] = {idle: [] for idle in (None, *IDLE)}
        for _ in range(arguments.repeats + 1):
            took[None].append(seconds(lambda: plain.update(same)))
            for idle, batch in batches.items():
                took[idle].append(seconds(lambda batch=batch: learner.update(batch)))
    tokens = sum(len(row.token_ids) for row in rows)
    warm = {idle: times[1:] for idle, times in took.items()}  # the first round warms up
    for idle in IDLE:
        line = {
            "idle": idle,
            "seconds": round(statistics.median(warm[idle]), 3),
            "tokens_per_s": round(tokens / statistics.median(warm[idle])),
            "of_plain": round(ratio(warm[idle], warm[None]), 3),
            "of_all": round(ratio(warm[idle], warm[0.0]), 3),
        }
        print(json.dumps(line), flush=True)


def ratio(times: list[float], baseline: list[float]) -> float:
    """Median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


if __name__ == "__main__":
    main()
