"""From one checkpoint, train a batch with each loss, and compute logprobs of the next batch.

    checkpoint k, recorded batch k -> updates of one arm -> logprobs of the answers of step k + 1

No arm trains on these answers. Replayed answers are left out, because they may be in batch k.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.losses.arms import Arm
from lab.losses.recorded import recorded_batches, rollout_lines, source_of
from losses.groups import Source
from rl.config.facts import fact
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.learner.ranks import Ranks
from rl.records import RankBatch, SampledColumns, TrainingRow, columns_of
from rl.rollouts.plan import plan, weighted_row
from rl.runtime.folder import RunFolder, step_of
from rl.runtime.token_files import RecordedRow, read_rows

COLUMNS = ("loss", "better answers", "worse answers", "absolute change")
_NAMES = {column.recorded_as: name for name, column in columns_of(SampledColumns).items()}


def take_steps(folder: RunFolder, arms: Sequence[Arm], checkpoint: Path) -> Iterator[list[str]]:
    """Train each arm by one step from the checkpoint. Yield the cells of COLUMNS per arm.

    The cells are the arm's name, the mean change of log pi of the better answers of step k + 1, the
    mean change of the worse answers, and the mean absolute change of all answers. An answer is
    better (worse) if its recorded advantage, or the mean of several, is above (below) 0.
    """
    step = step_of(checkpoint)
    if not (batches := recorded_batches(folder, step)):
        raise ValueError(
            f"{folder}: no recorded token of step {step} was trained: choose an earlier "
            f"checkpoint with steps=0..{step}"
        )
    batch, lines = batches[0], rollout_lines(folder, step + 1)
    credits = [arm.with_credit(batch) for arm in arms]  # before training, because it may raise
    new = (row for row in read_rows(folder, step + 1) if source_of(row.id) is not Source.REPLAY)
    answers = {(one.id, one.row): one for one in new}
    if not answers:
        raise ValueError(f"{folder}: step {step + 1} has no recorded new rollout: use record=all")
    ids = {id: number for number, id in enumerate(dict.fromkeys(id for id, _ in answers))}
    signs = torch.tensor([np.mean(lines[id]["advantage"] or 0.0) for id in ids])
    held_out = [_to_row(row, rollout_id=ids[row.id]) for row in answers.values()]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks.join(Path(name) / "rendezvous", 60.0)
        for arm, (tokens, weights) in zip(arms, credits, strict=True):
            learner = Learner(arm.run, folder, ranks)
            learner.load(checkpoint)
            trained = []
            for number, row in enumerate(batch.rows):
                own = tokens.sequence_ids == number
                credit = (tokens.advantages[own].numpy(), weights[own].numpy())
                fields = {"rollout_id": "rollout_ids", "group_id": "group_ids", "source": "source"}
                fields["first_position"] = "positions"
                position = {key: int(getattr(tokens, x)[own][0]) for key, x in fields.items()}
                trained.append(_to_row(row, *credit, number=row.row, **position))
            scored = _rank_batch(arm.run, learner, held_out, step)
            before = _logprobs(learner, scored, len(ids))
            learner.update(_rank_batch(arm.run, learner, trained, step))
            change = _logprobs(learner, scored, len(ids)) - before
            means = (change[signs > 0].mean(), change[signs < 0].mean(), change.abs().mean())
            del learner  # free its memory for the learner of the next arm
            yield [arm.name, *(f"{mean:+.4f}" for mean in means)]


def _to_row(row: RecordedRow, advantages: Any = (0,), weights: Any = (0,), **position: int) -> Any:
    sampled: dict[str, Any] = {_NAMES[key]: np.nan_to_num(x) for key, x in row.sampled.items()}
    return weighted_row(TrainingRow(**sampled), advantages, weights, **position)


def _rank_batch(run: Run, learner: Learner, rows: Sequence[Any], step: int) -> RankBatch:
    settings = {"step": step, "ranks": 1, "metrics": {}, "shares_prefixes": learner.shares_prefixes}
    whole_groups = fact(run.loss["_target_"], "whole_groups", False)
    return plan(rows, tokens_per_micro_batch=8192, whole_groups=whole_groups, **settings)[0]


def _logprobs(learner: Learner, batch: RankBatch, count: int) -> Tensor:
    """Return log pi of each of `count` answers, summed over the tokens of the answer."""
    sums = torch.zeros(count)
    for micro in batch.micro_batches:
        tokens = Batch.of(micro, learner.policy.ranks.device, batch.step)
        sums.index_add_(0, tokens.rollout_ids.cpu(), learner.policy.score(tokens).cpu())
    return sums
