"""Compare a training step with the shortest plain torch program that computes the same gradient.

    python -m benchmarks.updating [--env wiki-search] [--rows 256] [--repeats 5]
    python -m benchmarks.updating --run outputs/<name>               rows of a run with record=all
    python -m benchmarks.updating --drawn 16 200 50 800 [key=value ...]    rows of a drawn group

Rows are those of the environment's expert, one thread, bfloat16. `idle` is the share of rows
without advantage. One JSON line each:

    {"idle": 0.44, "seconds": ..., "tokens_per_s": ..., "of_plain": ..., "of_all": ...}

`of_plain` divides the time of a whole update (objective, DeepSpeed, clipping, AdamW, metrics) by
that of plain torch (all logits at once, backward, AdamW), `of_all` by our own time with an
advantage in every row. Both are medians of the ratios of alternating rounds.

`--run` takes the rows of a run's last step. `--drawn 16 200 50 800` draws 16 rows with a common
prompt of 200 tokens and answers of 50 to 800. `of_unshared` then divides the processor time by that
with trainer.share_prefixes=false. `distinct` is the share of tokens that are computed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._composing import compose, seconds
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
from rl.runtime.token_files import read_rows
from rl.sampling.demonstrations import tokenize

IDLE = (0.0, 0.25, 0.44, 0.75)  # 0.44 was measured in wiki-search at version 30


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
def learning(
    asked: argparse.Namespace, overrides: Sequence[str] = ()
) -> Iterator[tuple[Run, RunFolder, Learner, list[Any]]]:
    """Prepare the learner of a run on one thread, and training rows for it."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    run = run_with_facts(compose([f"env={asked.env}", "trainer.num_threads=1", *overrides]))
    with tempfile.TemporaryDirectory() as name:
        run_folder = RunFolder(Path(name))
        model = build(run.model)()
        folder = model.prepare(run_folder.built_model)
        run_folder.set_model(folder)
        learner = Learner(run, run_folder, Ranks.join(run_folder.path / "rendezvous", 60.0))
        yield run, run_folder, learner, expert_rows(run, model, folder, asked.rows)


def expert_rows(run: Run, model: Any, folder: Path, count: int) -> list[Any]:
    """Return training rows from the demonstrations of the environment."""
    env = build(run.env)()
    renderer = load_renderer(folder, model.renderer)
    conversations = islice(env.demonstrations(Random(0)), count)
    return [tokenize(renderer, messages, run.max_seq_len)[0] for messages in conversations]


def recorded_rows(folder: Path) -> list[WeightedRow]:
    """Return the rows of the last step of a run with record=all."""
    found = RunFolder(folder)
    step = max(int(path.stem[5:]) for path in found.rollouts_of(0).parent.glob("step_*.jsonl"))
    lines = map(json.loads, found.rollouts_of(step).read_text().splitlines())
    credits = {line["id"]: (i, line["advantage"]) for i, line in enumerate(lines) if line["used"]}
    rows = []
    for each in read_rows(found, step):
        number, advantage = credits.get(each.id, (None, 0))
        if number is None:
            continue
        keys = {"mask": "completion_mask", "mu": "rollout_logprobs", "version": "token_versions"}
        columns = {keys.get(name, name): values for name, values in each.sampled.items()}
        columns["rollout_logprobs"] = np.nan_to_num(columns["rollout_logprobs"])
        advantages = advantage if isinstance(advantage, list) else [advantage]
        place = {"rollout_id": number, "number": each.row}
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


def compare_sharing(asked: argparse.Namespace) -> None:
    """Print the processor time of an update with shared prefixes and of one without."""
    rows = recorded_rows(asked.run) if asked.run else drawn_rows(*asked.drawn)
    took: dict[bool, list[float]] = {True: [], False: []}
    with learning(asked, asked.overrides) as (run, folder, learner, _):
        trainer = replace(run.trainer, share_prefixes=False)
        plain = Learner(replace(run, trainer=trainer), folder, learner.policy.ranks)
        budget, metrics = run.trainer.tokens_per_micro_batch, {}
        for _ in range(asked.repeats + 1):
            for each in (learner, plain):
                shares = each.shares_prefixes
                settings = {"step": 0, "ranks": 1, "metrics": metrics, "shares_prefixes": shares}
                began = time.process_time()
                (batch,) = plan(rows, tokens_per_micro_batch=budget, **settings)
                each.update(batch)
                took[shares].append(time.process_time() - began)
    shared, unshared = took[True][1:], took[False][1:]
    beginnings = {row.token_ids[:end].tobytes() for row in rows for end in range(1, row.length)}
    tokens = sum(row.length for row in rows)
    line = {
        "tokens": tokens,
        "distinct": round(len(beginnings) / tokens, 2),
        "seconds": round(statistics.median(shared), 3),
        "of_unshared": round(ratio(shared, unshared), 3),
    }
    print(json.dumps(line), flush=True)


def batch_of(run: Run, rows: list[Any], idle: float) -> RankBatch:
    """Return all rows as the batch of one step; a share `idle` of them has no advantage."""
    rng = Random(1)
    zero = set(rng.sample(range(len(rows)), round(idle * len(rows))))
    weight = 1 / sum(row.num_completion for row in rows)
    weighted = [
        weighted_row(
            replace(row, rollout_logprobs=row.completion_mask * -0.5),
            (0.0 if i in zero else rng.choice((-1.0, 1.0)),),
            (weight,),
            rollout_id=i,
        )
        for i, row in enumerate(rows)
    ]
    (share,) = plan(
        weighted,
        step=0,
        ranks=1,
        tokens_per_micro_batch=run.trainer.tokens_per_micro_batch,
        metrics={},
        shares_prefixes=run.trainer.share_prefixes,
    )
    return share


def main() -> None:
    """Measure all rounds, then print a line for each share."""
    arguments = parsed()
    if arguments.run or arguments.drawn:
        compare_sharing(arguments)
        return
    with learning(arguments) as (run, run_folder, learner, rows):
        plain = Plain(run_folder.initial_model(), run.optim["learning_rate"])
        batches = {idle: batch_of(run, rows, idle) for idle in IDLE}
        device = learner.policy.ranks.device
        same = [Batch.of(micro, device, 0) for micro in batches[0.0].micro_batches]
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
    """Return the median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


if __name__ == "__main__":
    main()
