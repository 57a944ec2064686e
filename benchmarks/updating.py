"""Compare a training step with the shortest plain torch program that computes the same gradient.

    python -m benchmarks.updating [--env wiki-search] [--rows 256] [--repeats 5] [key=value ...]

Rows are those of the environment's expert, one thread, bfloat16. `idle` is the share of rows
without advantage. `of_plain` divides the time of a whole update (objective, DeepSpeed, clipping,
AdamW, metrics) by that of plain torch (all logits at once, backward, AdamW), `of_all` by our own
time with an advantage in every row. Both are medians of the ratios of alternating rounds.

The program of 07b74374 also compared with trainer.share_prefixes=false. `--run` took the rows of a
run's last step. `--drawn 16 200 50 800` drew 16 rows with a common prompt of 200 tokens and answers
of 50 to 800. `of_unshared` is the ratio of the processor times, `distinct` the share of tokens that
are computed.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._measuring import folder_with, ratio, rounds, say
from rl.config.build import build
from rl.config.schema import Run
from rl.dry_call.learn import run_with_facts
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.learner.ranks import Ranks
from rl.model.loading import load_model
from rl.model.tokenizer import load_renderer
from rl.records import TrainingRow
from rl.rollouts.plan import WeightedRow, plan, weighted_row
from rl.runtime.folder import RunFolder
from rl.sampling.demonstrations import tokenize
from tests.support.composing import composed

IDLE = (0.0, 0.75)


class Plain:
    """Update on the same micro-batches as a short plain script would."""

    def __init__(self, folder: Path, rate: float) -> None:
        self._model = load_model(folder, torch.bfloat16, 0)
        self._model.set_attn_implementation("sdpa")  # the default of transformers
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate)

    def update(self, batches: list[Batch]) -> None:
        """Take one step of REINFORCE with an importance weight, about as CISPO does."""
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


def expert_rows(run: Run, folder: RunFolder, count: int) -> list[TrainingRow]:
    """Return training rows from the demonstrations of the environment."""
    renderer = load_renderer(folder.initial_model(), build(run.model)().renderer)
    conversations = islice(build(run.env)().demonstrations(Random(0)), count)
    return [tokenize(renderer, messages, run.max_seq_len)[0] for messages in conversations]


def with_advantages(rows: Sequence[TrainingRow], idle: float) -> list[WeightedRow]:
    """Return the rows with advantages of 1 or -1, and 0 for a share `idle` of them."""
    rng = Random(1)
    zero = set(rng.sample(range(len(rows)), round(idle * len(rows))))
    weights = (1 / sum(row.num_completion for row in rows),)
    weighted = []
    for i, row in enumerate(rows):
        row = replace(row, rollout_logprobs=row.completion_mask * np.float32(-0.5))
        advantage = 0.0 if i in zero else rng.choice((-1.0, 1.0))
        weighted.append(weighted_row(row, (advantage,), weights, rollout_id=i))
    return weighted


def main() -> None:
    """Print a line for each share of idle rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="wiki-search")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", default=[])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    run = run_with_facts(composed("trainer.num_threads=1", f"env={asked.env}", *asked.overrides))
    with folder_with(run.model) as folder:
        learner = Learner(run, folder, Ranks.join(folder.path / "rendezvous", 60.0))
        rows = expert_rows(run, folder, asked.rows)
        settings: dict[str, Any] = {"step": 0, "ranks": 1, "metrics": {}}
        settings["tokens_per_micro_batch"] = run.trainer.tokens_per_micro_batch
        settings["shares_prefixes"] = run.trainer.share_prefixes
        batches = {idle: plan(with_advantages(rows, idle), **settings)[0] for idle in IDLE}
        device = learner.policy.ranks.device
        same = [Batch.of(micro, device, 0) for micro in batches[0.0].micro_batches]
        plain = Plain(folder.initial_model(), run.optim["learning_rate"])
        works = {idle: partial(learner.update, batch) for idle, batch in batches.items()}
        took = rounds({"plain": lambda: plain.update(same), **works}, asked.repeats)
    tokens = sum(len(row.token_ids) for row in rows)
    for idle in IDLE:
        say(
            idle=idle,
            seconds=statistics.median(took[idle]),
            tokens_per_s=round(tokens / statistics.median(took[idle])),
            of_plain=ratio(took[idle], took["plain"]),
            of_all=ratio(took[idle], took[0.0]),
        )


if __name__ == "__main__":
    main()
