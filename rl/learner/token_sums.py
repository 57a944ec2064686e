"""Means over the tokens of a global batch, out of sums per micro-batch and rank."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class TokenSums:
    """What one rank has seen of a batch. N: completion tokens of a micro-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, value: Tensor, gap: Tensor, fresh: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Take in a micro-batch.

        Args:
            value: its share of the objective.
            gap: [N] |trainer logprob - vLLM's logprob|.
            fresh: [N] True where the very weights that are training sampled the token.
            metrics: [N] each.

        """
        self._add("loss", value.detach())
        self._add("tokens", torch.tensor(float(len(gap))))
        self._add("fresh_tokens", fresh.sum())
        self._add("fresh_gap", gap[fresh].sum())
        for name, values in metrics.items():
            self._add(f"mean/{name}", values.sum())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def means(self, device: torch.device) -> dict[str, float]:
        """Return the metrics of the global batch, the same on every rank. Collective."""
        names = sorted(self._sums)
        values = torch.stack([self._sums[name].double().cpu() for name in names]).to(device)
        dist.all_reduce(values)
        totals = dict(zip(names, values.tolist(), strict=True))
        tokens = max(totals["tokens"], 1.0)
        metrics = {
            f"train/{name.removeprefix('mean/')}": total / tokens
            for name, total in totals.items()
            if name.startswith("mean/")
        }
        metrics["train/loss"] = totals["loss"]
        if totals["fresh_tokens"]:
            metrics["mismatch/sampled_mean_abs"] = totals["fresh_gap"] / totals["fresh_tokens"]
        return metrics
