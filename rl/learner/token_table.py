"""Tables of the completion tokens of a global batch, with one line per rollout.

A rollout may have several rows (rl/sampling/row_builder.py), in several micro-batches and on
several ranks. A table joins them, because a critic's advantages depend on the whole rollout.

R: rollouts of the global batch, L: completion tokens of the longest rollout, N: completion tokens
of a micro-batch.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl.learner.objective import Batch
from rl.records import RankBatch


class TokenTable:
    """Copies values of tokens between this rank's micro-batches [N] and tables [R, L]."""

    def __init__(self, batch: RankBatch, micro_batches: Sequence[Batch]) -> None:
        lengths = torch.tensor(batch.lengths, dtype=torch.int64)  # [R]
        longest = int(lengths.max()) if len(lengths) else 0
        self.exists = torch.arange(longest) < lengths[:, None]  # [R, L] False at padding
        self._starts = lengths.cumsum(0) - lengths  # [R] flat index of each rollout's first token
        self._micro_batches = micro_batches

    def gather(self, *columns: Sequence[Tensor]) -> list[Tensor]:
        """Return each column, a tensor [N] per micro-batch, as a table [R, L]. Collective.

        The tables are float64, on the CPU, the same on every rank, and 0 at padding.
        """
        flat = torch.zeros(len(columns), int(self.exists.sum()), dtype=torch.float64)
        for line, column in zip(flat, columns, strict=True):
            for batch, values in zip(self._micro_batches, column, strict=True):
                line[self._token_indices(batch)] = values.detach().double().cpu()
        flat = flat.to(self._micro_batches[0].mask.device)
        dist.all_reduce(flat)  # each value is set on one rank, so the sum copies it to all ranks
        tables = torch.zeros(len(columns), *self.exists.shape, dtype=torch.float64)
        tables[:, self.exists] = flat.cpu()
        return list(tables)

    def scatter(self, table: Tensor) -> list[Tensor]:
        """Return the entries [N] of a table [R, L] that belong to each micro-batch, on the CPU."""
        flat = table[self.exists]
        return [flat[self._token_indices(batch)] for batch in self._micro_batches]

    def _token_indices(self, batch: Batch) -> Tensor:
        return self._starts[batch.rollout_ids.cpu()] + batch.positions.cpu()
