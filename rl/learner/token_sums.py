"""Compute means over the tokens of a global batch from sums per micro-batch and rank.

The mismatch between vLLM and the trainer is measured on the n tokens that vLLM sampled with the
policy version in training:

    w = pi / mu = exp(clamp(log pi - log mu))   pi: trainer, mu: vLLM, clamp: losses/tokens.py

    mismatch/sampled_mean_abs, sampled_max_abs  mean and maximum of |log pi - log mu|
    mismatch/sampled_kl                         mean of w - 1 - log w, an estimate of KL(mu || pi)
    mismatch/sampled_chi_square                 mean of w^2, minus 1: the variance if w has mean 1
    mismatch/sampled_effective_sample_size      (sum w)^2 / (n * sum w^2), 1 if all w are equal
"""

from collections import defaultdict
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from losses.tokens import log_ratio
from rl.learner.collectives import gather_bytes

# Each rank sends its sums and its largest |log pi - log mu|.
_RANK_DECODER = msgspec.msgpack.Decoder(tuple[dict[str, float], float])


class TokenSums:
    """Sums over the micro-batches of one rank. N: completion tokens of a micro-batch."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._max_gap = torch.zeros((), dtype=torch.float64)

    def add(
        self,
        value: Tensor,  # this micro-batch's share of the objective
        logprobs: Tensor,  # [N] log pi of the trainer
        rollout_logprobs: Tensor,  # [N] log mu of vLLM
        fresh: Tensor,  # [N] True for tokens sampled with the version in training
        metrics: Mapping[str, Tensor],  # tensors [N] or single numbers
    ) -> None:
        self._add("loss", value.detach())
        self._add("tokens", torch.tensor(float(len(logprobs))))
        for name, values in metrics.items():
            # If a metric is one number, count it once for each token.
            self._add(f"mean/{name}", values.flatten().expand(len(logprobs)).sum())
        pi, mu = (each.detach()[fresh].double() for each in (logprobs, rollout_logprobs))
        gap, log_w = (pi - mu).abs(), log_ratio(mu, pi)
        w = log_w.exp()
        self._add("fresh", fresh.sum())
        self._add("gap", gap.sum())
        self._add("k3", (log_w.expm1() - log_w).sum())
        self._add("w", w.sum())
        self._add("w squared", w.square().sum())
        if len(gap):
            self._max_gap = torch.maximum(self._max_gap, gap.max().cpu())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def means(self) -> dict[str, float]:
        """Return the metrics of the global batch, the same on every rank. Collective."""
        own = {name: float(value.double()) for name, value in self._sums.items()}
        # Send names with the sums, because a loss may return a metric for some micro-batches only.
        sent = msgspec.msgpack.encode((own, float(self._max_gap)))
        ranks = [_RANK_DECODER.decode(each) for each in gather_bytes(sent)]
        totals: dict[str, float] = defaultdict(float)
        for sums, _ in ranks:
            for name, value in sums.items():
                totals[name] += value
        tokens = max(totals["tokens"], 1.0)
        metrics = {
            f"train/{name.removeprefix('mean/')}": total / tokens
            for name, total in totals.items()
            if name.startswith("mean/")
        }
        # Use torch's maximum, because Python's may drop a NaN.
        max_gap = float(torch.tensor([each for _, each in ranks], dtype=torch.float64).max())
        return {**metrics, "train/loss": totals["loss"], **_mismatch_metrics(totals, max_gap)}


def _mismatch_metrics(totals: Mapping[str, float], max_gap: float) -> dict[str, float]:
    n = totals["fresh"]
    if not n:
        return {}
    measures = {
        "mean_abs": totals["gap"] / n,
        "max_abs": max_gap,
        "kl": totals["k3"] / n,
        "chi_square": totals["w squared"] / n - 1,
        "effective_sample_size": totals["w"] ** 2 / (n * totals["w squared"]),
    }
    return {f"mismatch/sampled_{name}": measure for name, measure in measures.items()}
