"""The completion tokens of a global batch in one table, one line per rollout.

A forked rollout has several rows, which may be in several micro-batches and on several ranks. A
critic's returns run along the whole rollout, so they need all of its tokens in one line.

R: rollouts of the global batch, L: completion tokens of the longest, N: of a micro-batch.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl.learner.objective import Batch
from rl.records import RankBatch


class TokenTable:
    """Maps the tokens of this rank's micro-batches to the table and back."""

    def __init__(self, batch: RankBatch, batches: Sequence[Batch]) -> None:
        lengths = torch.tensor(batch.lengths, dtype=torch.int64)  # [R]
        longest = int(lengths.max()) if len(lengths) else 0
        self.exists = torch.arange(longest) < lengths[:, None]  # [R, L] True where a token is
        self._starts = lengths.cumsum(0) - lengths  # [R] in the flat order of all tokens
        self._batches = batches

    def gather(self, *columns: Sequence[Tensor]) -> list[Tensor]:
        """Return one table [R, L] of float64 for each column: [N] of each micro-batch. Collective.

        The tables are the same on every rank, on the CPU, and 0 where there is no token.
        """
        flat = torch.zeros(len(columns), int(self.exists.sum()), dtype=torch.float64)
        for line, column in zip(flat, columns, strict=True):
            for batch, values in zip(self._batches, column, strict=True):
                line[self._places(batch)] = values.detach().double().cpu()
        device = self._batches[0].mask.device
        flat = flat.to(device)
        dist.all_reduce(flat)  # each token is on one rank, and the others have 0 there
        tables = []
        for line in flat.cpu():
            table = line.new_zeros(self.exists.shape)
            table[self.exists] = line
            tables.append(table)
        return tables

    def scatter(self, table: Tensor) -> list[Tensor]:
        """Return the entries [N] of a table [R, L] that belong to each micro-batch, on the CPU."""
        flat = table[self.exists]
        return [flat[self._places(batch)] for batch in self._batches]

    def _places(self, batch: Batch) -> Tensor:
        """Position [N] of each token in the flat order of all."""
        return self._starts[batch.rollout_ids.cpu()] + batch.positions.cpu()
