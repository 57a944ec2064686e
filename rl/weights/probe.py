"""Compare the logprobs of trainer and vLLM on the same text, right after a push.

Equal weights give different logprobs if trainer and vLLM compute attention or rope differently.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rl.inference.routes import VLLMRoutes
from rl.learner.policy import Policy
from rl.records import MicroBatch
from rl.runtime.failure import RunFailed

# The bound of later probes is this factor times the mean |logprob difference| of the first probe,
# because the usual rounding error depends on device and model. The bound is at least
# max_mismatch / 2, because later batches may contain less probable tokens, whose rounding errors
# are larger. The bound is at most 2 * max_mismatch.
_GROWTH = 5.0


@dataclass(frozen=True)
class ProbedRows:
    """Some rows of a batch, with the trainer's logprobs of their tokens."""

    token_ids: list[list[int]]
    logprobs: list[torch.Tensor]  # logprob of each token except the first, at temperature 1

    @classmethod
    def of(cls, policy: Policy, batch: MicroBatch, num_rows: int) -> "ProbedRows":
        """Compute the trainer's logprobs of the first `num_rows` rows. All ranks must call this."""
        # Drop the last token, so that the context has room for the token that vLLM samples.
        lengths = _lengths(batch)[:num_rows] - 1
        token_ids = batch.token_ids[:num_rows, : lengths.max()]
        rows = list(zip(token_ids, policy.logprobs(token_ids), lengths, strict=True))
        return cls([ids[:n].tolist() for ids, _, n in rows], [row[1:n] for _, row, n in rows])

    def measure_gap(self, vllm: VLLMRoutes, model: str) -> torch.Tensor:
        """Return |vLLM's logprob - trainer's logprob| of each token [N]. N may be 0."""
        with ThreadPoolExecutor(len(self.token_ids)) as pool:  # so that vLLM batches the requests
            # A row of one token has no token to score.
            scores = pool.map(lambda t: vllm.score(model, t) if len(t) > 1 else [], self.token_ids)
            pairs = zip(scores, self.logprobs, strict=True)
            return torch.cat([(torch.tensor(score) - row).abs() for score, row in pairs])


class MismatchBound:
    """The largest allowed mean |logprob difference|. It changes after the first probe."""

    def __init__(self, max_mismatch: float, *, resumed: bool) -> None:
        self._max_mismatch, self._is_first = max_mismatch, True
        # A resumed run gets the largest possible bound, because its earlier bound is not saved.
        self._bound = 2 * max_mismatch if resumed else max_mismatch

    def check(self, gap: torch.Tensor, version: int) -> dict[str, float]:
        """Raise RunFailed if the mean of `gap` [N] is NaN or exceeds the bound. Return metrics."""
        mean = float(gap.mean())
        if not mean <= self._bound:  # also True for NaN
            later = "" if self._is_first else ", adapted to the first probe"
            raise RunFailed(
                "trainer and vLLM compute different logprobs with the weights of version "
                f"{version}: mean |difference| {mean:.4f}, and at most {self._bound:g} is allowed "
                f"(sync.max_mismatch={self._max_mismatch:g}{later}). Every importance ratio would "
                "be wrong. Give both the same model.dtype, attention and rope settings "
                "(docs/troubleshooting.md, mismatch)"
            )
        if self._is_first:
            least, most = 0.5 * self._max_mismatch, 2 * self._max_mismatch
            self._bound, self._is_first = min(max(_GROWTH * mean, least), most), False
        return {"mismatch/mean_abs": mean, "mismatch/max_abs": float(gap.max())}


def _lengths(batch: MicroBatch) -> np.ndarray:
    """Return the number of tokens [B] of each row up to its last completion token."""
    width = batch.completion_mask.shape[1]
    from_the_end = batch.completion_mask[:, ::-1].argmax(axis=1)  # [B]
    # Return 2 for a row without completion tokens, so that `of` keeps one token and scores none.
    return np.where(batch.completion_mask.any(axis=1), width - from_the_end, 2)
