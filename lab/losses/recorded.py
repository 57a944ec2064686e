"""Read the recorded tokens of an update as the input of a token loss.

Most token losses and their gradients with respect to log pi need only recorded numbers: pi, mu, old
and ref (losses/tokens.py), entropies, advantages and weights. N: trained tokens, S: their rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import tokenizers
import torch
from pandas import DataFrame
from torch import Tensor

from lab.viewer.token_record import pieces
from losses.groups import Source
from losses.tokens import Tokens, ratio_to
from rl.runtime.folder import RunFolder, read_records
from rl.runtime.token_files import RecordedRow, read_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedBatch:
    """The trained tokens of one update of a step."""

    step: int
    update: int
    tokens: Tokens  # sequence_ids are indices of `rows`
    weights: Tensor  # [N] weight of each token in the objective
    grads: Tensor  # [N] recorded d objective / d log pi
    rows: list[RecordedRow]  # [S]
    lines: Mapping[str, Mapping[str, Any]]  # rollout id -> its line in the step's rollout file
    token_ids: Tensor  # [N] id of each token in the vocabulary
    num_untrained: int  # number of the step's recorded rows that no rank trained
    is_whole: bool  # whether every trained rollout of the step was recorded

    @cached_property
    def rollout_ids(self) -> list[str]:
        return [row.id for row in self.rows]  # [S]


def recorded_tokens(path: str | Path, step: int, update: int = 0) -> RecordedBatch:
    """Return the recorded tokens of one update of a step, or raise ValueError if there are none."""
    batches = recorded_batches(RunFolder(Path(path)), step)
    if not 0 <= update < len(batches):
        where = f"update {update} of step {step}"
        raise ValueError(f"{path} has no token record of {where}: train with record=all")
    return batches[update]


def recorded_batches(folder: RunFolder, step: int) -> list[RecordedBatch]:
    """Return a batch for each update of a step; [] if the step trained no recorded token."""
    recorded = sorted(read_rows(folder, step), key=lambda row: (row.id, row.row))
    updates = sorted({row.update for row in recorded if row.trained})
    lines = rollout_lines(folder, step) if updates else {}
    return [_batch_of_update(recorded, lines, step, update) for update in updates]


def _batch_of_update(
    recorded: Sequence[RecordedRow], lines: Mapping[str, Mapping[str, Any]], step: int, update: int
) -> RecordedBatch:
    rows = [row for row in recorded if row.trained and row.update == update]
    masks = [row.sampled["mask"] for row in rows]
    lengths = [int(mask.sum()) for mask in masks]
    sequence_ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))  # [N]

    def column(name: str) -> Tensor:
        parts = [row.columns[name][mask] for row, mask in zip(rows, masks, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    indices = {id: index for index, id in enumerate(dict.fromkeys(row.id for row in rows))}
    rollouts = torch.tensor([indices[row.id] for row in rows])  # [S]
    keys = [(row.id.split(".")[0], lines[row.id].get("role")) for row in rows]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    groups = torch.tensor([numbers[key] for key in keys])  # [S]
    sources = torch.tensor([source_of(row.id) for row in rows])  # [S]
    of_token = pandas.Series(rollouts[sequence_ids].numpy())  # [N] each token's rollout
    trained = {id for id, line in lines.items() if line["used"] and line["tokens"]}
    recorded_names = rows[0].trained.keys()
    tokens = Tokens(
        logprobs=column("pi"),
        rollout_logprobs=column("mu"),
        advantages=column("advantage"),
        sequence_ids=sequence_ids,
        num_sequences=len(rows),
        staleness=step - column("version").long(),
        entropies=column("entropy"),
        positions=torch.tensor(of_token.groupby(of_token).cumcount().to_numpy()),
        turns=column("turns").long(),
        rollout_ids=rollouts[sequence_ids],
        group_ids=groups[sequence_ids],
        source=sources[sequence_ids],
        old_logprobs=column("old") if "old" in recorded_names else None,
        ref_logprobs=column("ref") if "ref" in recorded_names else None,
    )
    return RecordedBatch(
        step=step,
        update=update,
        tokens=tokens,
        weights=column("weight"),
        grads=column("grad"),
        rows=rows,
        lines=lines,
        token_ids=column("token_ids").long(),
        num_untrained=sum(not row.trained for row in recorded),
        is_whole=trained <= indices.keys(),
    )


def token_table(
    batches: Sequence[RecordedBatch], tokenizer: tokenizers.Tokenizer | None
) -> DataFrame:
    frames = []
    for batch in batches:
        tokens, rows = batch.tokens, batch.tokens.sequence_ids
        ids = [batch.token_ids[rows == row].tolist() for row in range(len(batch.rows))]
        columns = {
            "row": rows,
            "turn": tokens.turns,
            "at": tokens.positions,
            "stale": tokens.staleness,
            "ratio": ratio_to(tokens.anchor, tokens.logprobs),
            "advantage": tokens.advantages,
        }
        frame = DataFrame({name: values.numpy() for name, values in columns.items()})
        frame["text"] = [text for row in ids for text in pieces(tokenizer, row)]
        frame["rollout"] = [batch.rollout_ids[row] for row in rows.tolist()]
        frames.append(frame.assign(step=batch.step, update=batch.update))
    return pandas.concat(frames, ignore_index=True)


def source_of(id: str) -> Source:
    """Return a rollout's source from its id: 000001.2@4 is a replay, -000001.0 a demonstration."""
    if "@" in id:
        return Source.REPLAY
    return Source.DEMONSTRATION if id.startswith("-") else Source.POLICY


def recorded_steps(folder: RunFolder) -> list[int]:
    paths = folder.tokens.glob("step_*.trainer.rank0.parquet")
    return sorted(int(path.name.split(".")[0].removeprefix("step_")) for path in paths)


def rollout_lines(folder: RunFolder, step: int) -> dict[str, Mapping[str, Any]]:
    """Return the parsed lines of a step's rollout file by rollout id."""
    return {line["id"]: line for line in read_records(folder.rollouts_of(step))}
