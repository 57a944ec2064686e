"""Take the optimizer step of each loss from the same checkpoint, and score other answers.

    checkpoint k, recorded batch k -> updates of one arm -> logprobs of the answers of step k + 1

The answers of step k + 1 are held out: the step does not train them.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.losses.arms import Arm
from lab.losses.recorded import RecordedBatch, recorded_batches, rollout_lines
from rl.config.build import build
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.learner.ranks import Ranks
from rl.records import Floats, SampledColumns, TrainingRow, columns_of
from rl.rollouts.plan import WeightedRow, plan, weighted_row
from rl.runtime.folder import RunFolder, step_of
from rl.runtime.token_files import RecordedRow, read_rows

COLUMNS = ("loss", "better answers", "worse answers", "absolute change")


def checkpoint_of(folder: RunFolder, steps: Sequence[int]) -> Path:
    """Return the newest checkpoint whose batch and whose next batch were recorded.

    Raises:
        ValueError: there is no such checkpoint.
    """
    for path in reversed(folder.complete_checkpoints()):
        if step_of(path) in steps and read_rows(folder, step_of(path) + 1):
            return path
    raise ValueError(
        f"{folder} has no checkpoint with recorded tokens of the two steps after it: train with "
        "record=all and trainer.checkpoint_every=10, and with max_steps=21"
    )


def steps_taken(folder: RunFolder, arms: Sequence[Arm], checkpoint: Path) -> list[list[str]]:
    """Return a row of COLUMNS for each arm: mean changes of log pi of the held-out answers.

    An answer is better (worse) than its group if its recorded advantage is above (below) 0.

    Raises:
        ValueError: an arm needs what the record does not have.
    """
    step, table = step_of(checkpoint), []
    (recorded, *_), lines = recorded_batches(folder, step), rollout_lines(folder, step + 1)
    answers = list({(one.id, one.row): one for one in read_rows(folder, step + 1)}.values())
    signs = torch.tensor([np.mean(lines[one.id].get("advantage") or 0.0) for one in answers])
    held_out = [_row(*one) for one in enumerate(answers)]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks.join(Path(name) / "rendezvous", 60.0)
        for arm in arms:
            is_penalised = build(arm.run.kl)().place == "reward" and arm.run.kl["beta"]
            if (
                "estimator" in arm.run.critic
                or is_penalised
                or arm.base.trainer.ranks not in (1, None)
            ):
                raise ValueError(
                    f"{arm.name}: step=true needs one rank, no critic, no KL in the reward"
                )
            learner = Learner(arm.run, folder, ranks)
            learner.load(checkpoint)
            before = _logprobs(learner, held_out, step)
            learner.update(_planned(learner, _trained(arm, recorded, folder), step))
            change = _logprobs(learner, held_out, step) - before
            means = (change[signs > 0].mean(), change[signs < 0].mean(), change.abs().mean())
            table.append([arm.name, *(f"{mean:+.4f}" for mean in means)])
    return table


def _trained(arm: Arm, recorded: RecordedBatch, folder: RunFolder) -> list[WeightedRow]:
    """Return the rows of the batch with the arm's advantages and weights."""
    tokens, weights = arm.credited(recorded, folder)
    rows = []
    for number, row in enumerate(recorded.rows):
        own = tokens.sequence_ids == number
        first = int(own.nonzero()[0])
        names = {"group_id": "group_ids", "source": "source", "first_position": "positions"}
        place = {key: int(getattr(tokens, name)[first]) for key, name in names.items()}
        credit = (tokens.advantages[own].numpy(), weights[own].numpy())
        rows.append(_row(int(tokens.rollout_ids[first]), row, *credit, **place))
    return rows


def _row(rollout_id: int, row: RecordedRow, *credit: Floats, **place: int) -> WeightedRow:
    """Return a recorded row; `credit` is the advantage and the weight of each trained token."""
    names = {column.recorded_as: name for name, column in columns_of(SampledColumns).items()}
    sampled: dict[str, Any] = {names[key]: np.nan_to_num(x) for key, x in row.sampled.items()}
    place |= {"rollout_id": rollout_id, "number": row.row}
    return weighted_row(TrainingRow(**sampled), *(credit or ((0.0,), (0.0,))), **place)


def _planned(learner: Learner, rows: Sequence[WeightedRow], step: int) -> Any:
    settings = {"step": step, "ranks": 1, "metrics": {}, "shares_prefixes": learner.shares_prefixes}
    (batch,) = plan(rows, tokens_per_micro_batch=8192, **settings)
    return batch


def _logprobs(learner: Learner, rows: Sequence[WeightedRow], step: int) -> Tensor:
    """Return log pi of each row, the sum over its tokens."""
    sums = torch.zeros(len(rows))
    for micro in _planned(learner, rows, step).micro_batches:
        batch = Batch.of(micro, learner.policy.ranks.device, step)
        sums.index_add_(0, batch.rollout_ids.cpu(), learner.policy.score(batch).cpu())
    return sums
