"""Record the per-token results of a training step (rl/runtime/token_files.py).

N: number of completion tokens of a micro-batch, B: number of its rows.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl.records import RankBatch
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, write_lines


class StepRecord:
    """The per-token results of one step on one rank."""

    def __init__(self, batch: RankBatch) -> None:
        self._batch = batch
        self._observations: list[tuple[int, int, dict[str, Tensor]]] = []

    def observe(self, update: int, number: int, tokens: Mapping[str, Tensor]) -> None:
        """Store the token results of one micro-batch; the learner calls this as its `Observer`."""
        # Keep the tensors on the GPU, because copying them would stall the GPU during the update.
        self._observations.append((update, number, dict(tokens)))

    def write(self, run_folder: RunFolder, rank: int) -> None:
        """Write the token results of the recorded rows to a file, even if no row is recorded."""
        names = list(dict.fromkeys(name for *_, tokens in self._observations for name in tokens))
        ids: list[str] = []
        rows: list[int] = []
        updates: list[int] = []
        lengths: list[int] = []
        columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for update, number, tokens in self._observations:
            micro = self._batch.micro_batches[number]
            record_ids = [self._batch.record_ids[i] if i >= 0 else "" for i in micro.rollout_ids]
            recorded = np.array([bool(id) for id in record_ids])  # [B]
            counts = micro.completion_mask.sum(1)  # [B]
            ids += filter(None, record_ids)
            rows += micro.row_numbers[recorded].tolist()
            updates += [update] * int(recorded.sum())
            lengths += counts[recorded].tolist()
            chosen = np.repeat(recorded, counts)  # [N]
            # Stack the tensors, because one copy from the GPU is faster than many.
            values = torch.stack([each.float() for each in tokens.values()]).cpu().numpy()
            by_name = dict(zip(tokens, values[:, chosen], strict=True))
            # Use NaN if the loss returned this metric only for other micro-batches.
            absent = np.full(chosen.sum(), np.nan, np.float32)
            for name in names:
                columns[name].append(by_name.get(name, absent))
        flat = {name: np.concatenate(each) for name, each in columns.items()}
        lines = Lines(ids, rows, lengths, flat, updates)
        write_lines(run_folder.tokens_of(self._batch.step, f"trainer.rank{rank}"), lines)
