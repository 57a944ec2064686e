"""Compare a training step with the shortest plain torch program that computes the same gradient.

    python -m benchmarks.updating [--env wiki-search] [--rows 256] [--repeats 5]
    python -m benchmarks.updating --run outputs/<name>               rows of a run with record=all
    python -m benchmarks.updating --drawn 16 200 50 800 [key=value ...]    rows of a drawn group

Rows are those of the environment's expert, one thread, bfloat16. `idle` is the share of rows
without advantage. `of_plain` divides the time of a whole update (objective, DeepSpeed, clipping,
AdamW, metrics) by that of plain torch (all logits at once, backward, AdamW), `of_all` by our own
time with an advantage in every row. Both are medians of the ratios of alternating rounds.

`--run` takes the rows of a run's last step. `--drawn 16 200 50 800` draws 16 rows with a common
prompt of 200 tokens and answers of 50 to 800. `of_unshared` then divides the processor time by that
with trainer.share_prefixes=false. `distinct` is the share of tokens that are computed.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from lab.losses.recorded import recorded_batches
from rl.config.build import build
from rl.config.schema import Run
from rl.dry_call.learn import run_with_facts
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.learner.ranks import Ranks
from rl.model.loading import load_model
from rl.model.tokenizer import load_renderer
from rl.records import RankBatch, TrainingRow
from rl.rollouts.plan import WeightedRow, plan, weighted_row
from rl.runtime.folder import RunFolder
from rl.sampling.demonstrations import tokenize
from tests.support.composing import composed

IDLE = (0.0, 0.25, 0.44, 0.75)  # 0.44 was measured in wiki-search at version 30
COLUMNS = {"mask": "completion_mask", "mu": "rollout_logprobs", "version": "token_versions"}


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


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="wiki-search")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--drawn", type=int, nargs=4, metavar=("ROWS", "PROMPT", "LEAST", "MOST"))
    parser.add_argument("overrides", nargs="*", default=[])
    return parser.parse_args()


@contextmanager
def learning(asked: argparse.Namespace) -> Iterator[tuple[Run, RunFolder, Learner]]:
    """Prepare the learner of a run on one thread."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    overrides = [f"env={asked.env}", "trainer.num_threads=1", *asked.overrides]
    run = run_with_facts(composed(*overrides))
    with folder_with(run.model) as folder:
        yield run, folder, Learner(run, folder, Ranks.join(folder.path / "rendezvous", 60.0))


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


def recorded_rows(path: Path) -> list[WeightedRow]:
    """Return the trained rows of the last step of a run with record=all."""
    folder = RunFolder(path)
    step = max(int(path.stem[5:]) for path in folder.rollouts_of(0).parent.glob("step_*.jsonl"))
    batch, rows = recorded_batches(folder, step)[0], []
    for number, row in enumerate(batch.rows):
        own = batch.tokens.sequence_ids == number
        columns = {COLUMNS.get(name, name): np.nan_to_num(x) for name, x in row.sampled.items()}
        place = {"rollout_id": int(batch.tokens.rollout_ids[own][0]), "number": row.row}
        advantages = batch.tokens.advantages[own].numpy()
        rows.append(weighted_row(TrainingRow(**columns), advantages, (1e-4,), **place))
    return rows


def drawn_rows(count: int, prompt: int, least: int, most: int) -> list[WeightedRow]:
    """Return rows of one group with random tokens."""
    rng = np.random.default_rng(0)
    common, rows = rng.integers(3, 250, prompt), []
    for number in range(count):
        ids = np.concatenate([common, rng.integers(3, 250, rng.integers(least, most + 1))])
        mask = np.arange(len(ids)) >= prompt
        versions = mask.astype(np.int32) - 1
        row = TrainingRow(ids.astype(np.int32), mask, mask * np.float32(-5), versions, versions)
        rows.append(weighted_row(row, (rng.choice([-1.0, 1.0]),), (1e-4,), rollout_id=number))
    return rows


def batch_of(run: Run, rows: Sequence[WeightedRow]) -> RankBatch:
    """Return the rows as the batch of one step on one rank."""
    settings: dict[str, Any] = {"step": 0, "ranks": 1, "metrics": {}}
    settings["tokens_per_micro_batch"] = run.trainer.tokens_per_micro_batch
    return plan(rows, shares_prefixes=run.trainer.share_prefixes, **settings)[0]


def compare_sharing(asked: argparse.Namespace) -> None:
    """Print the processor time of an update with shared prefixes and of one without."""
    rows = recorded_rows(asked.run) if asked.run else drawn_rows(*asked.drawn)
    with learning(asked) as (run, folder, learner):
        plain = replace(run, trainer=replace(run.trainer, share_prefixes=False))
        other = Learner(plain, folder, learner.policy.ranks)
        works = {
            "shared": lambda: learner.update(batch_of(run, rows)),
            "unshared": lambda: other.update(batch_of(plain, rows)),
        }
        took = rounds(works, asked.repeats, time.process_time)
    beginnings = {row.token_ids[:end].tobytes() for row in rows for end in range(1, row.length)}
    tokens = sum(row.length for row in rows)
    say(
        tokens=tokens,
        distinct=len(beginnings) / tokens,
        seconds=statistics.median(took["shared"]),
        of_unshared=ratio(took["shared"], took["unshared"]),
    )


def compare_with_plain(asked: argparse.Namespace) -> None:
    """Print a line for each share of idle rows."""
    with learning(asked) as (run, folder, learner):
        rows = expert_rows(run, folder, asked.rows)
        batches = {idle: batch_of(run, with_advantages(rows, idle)) for idle in IDLE}
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
    asked = parsed()
    (compare_sharing if asked.run or asked.drawn else compare_with_plain)(asked)
