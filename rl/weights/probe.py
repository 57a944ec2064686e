"""Whether trainer and vLLM agree on the logprobs of given text, right after a push.

They may hold the same weights and still compute something else: another attention, another rope.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl.inference.routes import VLLMRoutes
from rl.records import MicroBatch
from rl.run.failure import RunFailed

if TYPE_CHECKING:
    from rl.learner.policy import Policy

# A policy grown sure of itself has tokens so improbable that rounding alone moves them more.
_LATER_SLACK = 2.0


@dataclass(frozen=True)
class ProbedRows:
    """A few rows of a batch with what the trainer makes of them."""

    texts: list[list[int]]
    logprobs: list[torch.Tensor]  # of each token but the first, at temperature 1

    @classmethod
    def of(cls, policy: "Policy", batch: MicroBatch, num_rows: int) -> "ProbedRows":
        """Score the first rows. Collective."""
        # All but the last token: a row may fill vLLM's context, which must have room for one more.
        lengths = _lengths(batch)[:num_rows] - 1
        token_ids = batch.token_ids[:num_rows, : lengths.max()]
        scored = policy.logprobs(token_ids)
        rows = list(zip(token_ids, scored, lengths, strict=True))
        return cls([ids[:n].tolist() for ids, _, n in rows], [row[1:n] for _, row, n in rows])

    def gap(self, vllm: VLLMRoutes, model: str) -> torch.Tensor:
        """|logprob difference| of all tokens [N]; none where no row trained."""
        with ThreadPoolExecutor(len(self.texts)) as pool:  # each waits for vLLM's next step
            scores = list(pool.map(lambda text: _score(vllm, model, text), self.texts))
        pairs = zip(scores, self.logprobs, strict=True)
        return torch.cat([(torch.tensor(score) - row).abs() for score, row in pairs])


class MismatchBound:
    """How far they may be apart: at the first probe of a run less than later on."""

    def __init__(self, max_mismatch: float, *, goes_on: bool) -> None:
        """`goes_on`: the run has been probed before it was stopped, so no probe is its first."""
        self._max_mismatch = max_mismatch
        self._slack = _LATER_SLACK if goes_on else 1.0

    def metrics(self, gap: torch.Tensor, version: int) -> dict[str, float]:
        """Return mean and maximum of a gap [N].

        Raises:
            RunFailed: the mean is above `max_mismatch`, at a later probe above twice as much.

        """
        mean = float(gap.mean())
        bound = self._max_mismatch * self._slack
        if mean > bound:
            later = ", doubled after the first probe" if self._slack > 1 else ""
            raise RunFailed(
                f"trainer and vLLM disagree on the weights of version {version}: mean |logprob "
                f"difference| {mean:.4f} > {bound:g} (sync.max_mismatch={self._max_mismatch:g}"
                f"{later}). Every importance ratio would be wrong. Compare model.dtype, "
                "attention and rope settings of both"
            )
        self._slack = _LATER_SLACK
        return {"mismatch/mean_abs": mean, "mismatch/max_abs": float(gap.max())}


def _score(vllm: VLLMRoutes, model: str, token_ids: list[int]) -> list[float]:
    """Return vLLM's logprob of each token but the first."""
    return vllm.score(model, token_ids) if len(token_ids) > 1 else []


def _lengths(batch: MicroBatch) -> np.ndarray:
    """Tokens of each row up to its last completion token. [B]"""
    width = batch.completion_mask.shape[1]
    from_the_end = batch.completion_mask[:, ::-1].argmax(axis=1)  # [B]
    # 2 where nothing was sampled: less its last one nothing is left to compare.
    return np.where(batch.completion_mask.any(axis=1), width - from_the_end, 2)
