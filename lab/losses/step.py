"""Take the optimizer step of each loss from the same checkpoint, and score other answers.

    checkpoint k, recorded batch k -> updates of one arm -> logprobs of the answers of step k + 1

The answers of step k + 1 are held out: the step does not train them.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.losses.arms import Arm
from lab.losses.recorded import RecordedBatch, recorded_batches, rollout_lines
from rl.config.build import build
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.learner.ranks import Ranks
from rl.records import Floats, RankBatch, SampledColumns, TrainingRow, columns_of
from rl.rollouts.plan import WeightedRow, plan, weighted_row
from rl.runtime.folder import RunFolder, step_of
from rl.runtime.token_files import RecordedRow, read_rows

COLUMNS = ("loss", "better answers", "worse answers", "mean change of a token")


def checkpoint_of(folder: RunFolder, steps: Sequence[int]) -> tuple[Path, int]:
    """Return the newest checkpoint with a recorded batch and answers after it, and its step.

    Raises:
        ValueError: there is no such checkpoint.
    """
    for path in reversed(folder.complete_checkpoints()):
        if step_of(path) in steps and read_rows(folder, step_of(path) + 1):
            return path, step_of(path)
    raise ValueError(
        f"{folder} has no checkpoint at one of these steps with recorded tokens of it and of the "
        "next one: train with record=all and trainer.checkpoint_every=10, and end between two"
    )


def steps_taken(
    folder: RunFolder, arms: Sequence[Arm], checkpoint: Path, step: int
) -> list[list[str]]:
    """Return a row of COLUMNS for each arm.

    The change of an answer is the sum over its tokens of log pi after the step minus before it.
    An answer is better (worse) if its recorded advantage is above (below) 0.

    Raises:
        ValueError: an arm needs more than one rank or recorded rewards.
    """
    (recorded, *_), rows = recorded_batches(folder, step), read_rows(folder, step + 1)
    answers = list({(row.id, row.row): row for row in rows}.values())  # once, not per update
    signs = _signs(folder, step + 1, answers)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    table = []
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks.join(Path(name) / "rendezvous", 60.0)
        for arm in arms:
            _ensure_possible(arm, folder)
            learner = Learner(arm.run, folder, ranks)
            learner.load(checkpoint)
            batch = _planned(_rows(arm, recorded, folder), step, learner)
            held_out = _planned(
                [_row(row, index) for index, row in enumerate(answers)], step, learner
            )
            before = _logprobs(learner, held_out)
            learner.update(batch)
            changes = _logprobs(learner, held_out) - before
            ids = torch.cat(
                [Batch.of(m, ranks.device, step).rollout_ids for m in held_out.micro_batches]
            )
            sums = torch.zeros(len(answers)).index_add_(0, ids.cpu(), changes.cpu())
            means = (sums[signs > 0].mean(), sums[signs < 0].mean(), changes.abs().mean())
            table.append([arm.name, *(f"{mean:+.4f}" for mean in means)])
    return table


def _ensure_possible(arm: Arm, folder: RunFolder) -> None:
    penalises_reward = build(arm.run.kl)().place == "reward" and arm.run.kl["beta"]
    if "estimator" in arm.run.critic or penalises_reward:
        raise ValueError(f"{arm.name}: a critic or a KL penalty in the reward needs more than rows")
    if len(list(folder.tokens.glob("step_*.trainer.rank1.parquet"))):
        raise ValueError(f"{folder} trained with several ranks: step=true loads one rank's state")


def _rows(arm: Arm, recorded: RecordedBatch, folder: RunFolder) -> list[WeightedRow]:
    tokens, weights = arm.credited(recorded, folder)
    rows = []
    for number, row in enumerate(recorded.rows):
        own = tokens.sequence_ids == number
        rows.append(
            _row(
                int(tokens.rollout_ids[own][0]),
                row,
                tokens.advantages[own].numpy(),
                weights[own].numpy(),
                group_id=int(tokens.group_ids[own][0]),
                source=int(tokens.source[own][0]),
                first_position=int(tokens.positions[own][0]),
            )
        )
    return rows


def _row(rollout_id: int, row: RecordedRow, *credit: Floats, **place: int) -> WeightedRow:
    """Return a recorded row; `credit` is the advantage and the weight of each trained token."""
    names = {column.recorded_as: name for name, column in columns_of(SampledColumns).items()}
    sampled = {names[name]: np.nan_to_num(values) for name, values in row.sampled.items()}
    place |= {"rollout_id": rollout_id, "number": row.row}
    return weighted_row(TrainingRow(**sampled), *(credit or ((0.0,), (0.0,))), **place)


def _planned(rows: Sequence[WeightedRow], step: int, learner: Learner) -> RankBatch:
    settings = {"step": step, "ranks": 1, "metrics": {}, "shares_prefixes": learner.shares_prefixes}
    (batch,) = plan(rows, tokens_per_micro_batch=8192, **settings)
    return batch


def _logprobs(learner: Learner, batch: RankBatch) -> Tensor:
    """Return the logprobs [N] of all answers, in the order of the micro-batches."""
    device = learner.policy.ranks.device
    micros = [Batch.of(micro, device, batch.step) for micro in batch.micro_batches]
    return torch.cat([learner.policy.score(micro) for micro in micros])


def _signs(folder: RunFolder, step: int, answers: Sequence[RecordedRow]) -> Tensor:
    lines = rollout_lines(folder, step)
    advantages = [lines[row.id].get("advantage") or 0.0 for row in answers]
    return torch.tensor([np.mean(one) for one in advantages])
