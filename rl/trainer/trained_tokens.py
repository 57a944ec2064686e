"""Record the values that a step's updates compute per token (rl/runtime/token_files.py).

N: number of completion tokens of a micro-batch, B: number of its rows.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rl.records import RankBatch
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, write_lines


class StepRecord:
    """The recorded token values of one step on one rank."""

    def __init__(self, batch: RankBatch) -> None:
        self._batch = batch
        # Each entry is (update, micro-batch, values on the device) of the newest update.
        self._observed: list[tuple[int, int, dict[str, Tensor]]] = []
        self._recorded: list[Lines] = []  # one entry per update and micro-batch

    def observe(self, update: int, number: int, tokens: Mapping[str, Tensor]) -> None:
        """Store the values of micro-batch `number`. The learner calls this as its `Observer`."""
        if self._observed and self._observed[-1][0] != update:
            self._copy_to_cpu()
        # Keep the tensors on the GPU, because copying them would stall the GPU during the update.
        # Also keep the rows without a record id, because `write_all` writes all rows.
        self._observed.append((update, number, dict(tokens)))

    def _copy_to_cpu(self) -> None:
        for update, number, tokens in self._observed:
            micro, all_ids = self._batch.micro_batches[number], self._batch.record_ids
            ids = [all_ids[i] if all_ids and i >= 0 else "" for i in micro.rollout_ids]
            if not any(ids):
                continue
            is_recorded = np.array(list(map(bool, ids)))  # [B]
            counts = micro.completion_mask.sum(1)  # [B]
            values = torch.stack([each.float() for each in tokens.values()]).cpu().numpy()
            chosen = values[:, np.repeat(is_recorded, counts)]  # [columns, N of the recorded rows]
            self._recorded.append(
                Lines(
                    list(filter(None, ids)),
                    micro.row_numbers[is_recorded].tolist(),
                    counts[is_recorded].tolist(),
                    dict(zip(tokens, chosen, strict=True)),
                    [update] * int(is_recorded.sum()),
                )
            )
        self._observed.clear()

    def write(self, run_folder: RunFolder, rank: int) -> None:
        self._copy_to_cpu()
        names = dict.fromkeys(name for each in self._recorded for name in each.columns)
        pairs = [(r, np.full(sum(r.lengths), np.nan, np.float32)) for r in self._recorded]
        lines = Lines(
            [id for each in self._recorded for id in each.ids],
            [number for each in self._recorded for number in each.rows],
            [length for each in self._recorded for length in each.lengths],
            {n: np.concatenate([r.columns.get(n, empty) for r, empty in pairs]) for n in names},
            [update for each in self._recorded for update in each.updates or ()],
        )
        write_lines(run_folder.tokens_of(self._batch.step, f"trainer.rank{rank}"), lines)

    def write_all(self, run_folder: RunFolder, rank: int, ids: tuple[str, ...]) -> set[str]:
        """Write all rows of the last update, but of earlier updates only rows with a record id.

        Return the ids of the rollouts that have a token with a NaN or infinite loss or gradient.
        """
        not_finite = set[str]()
        for _, number, tokens in self._observed:
            micro = self._batch.micro_batches[number]
            rollout_of_token = np.repeat(micro.rollout_ids, micro.completion_mask.sum(1))  # [N]
            kinds = [tokens[k] for k in ("loss", "grad", "candidate_grad") if k in tokens]
            is_finite = torch.stack(kinds).isfinite().all(0).cpu().numpy()
            not_finite |= {ids[i] for i in rollout_of_token[~is_finite]}
        self._batch = replace(self._batch, record_ids=ids)
        self.write(run_folder, rank)
        return not_finite
