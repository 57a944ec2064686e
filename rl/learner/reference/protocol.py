"""The interface of references, and the settings from which they are built."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from rl.learner.logprobs import Logprobs, Rows
from rl.learner.policy import Policy
from rl.runtime.failure import RunFailed


class Reference:
    """The base class of references. All ranks call every method together."""

    # If False, `score` runs a model on padded rows, and the plan of micro-batches counts padding.
    shares_prefixes: bool = True

    def score(self, batches: Sequence[Rows]) -> list[Logprobs]:
        """Return logprobs of each micro-batch's completion tokens at the sampler's temperature."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last call of `score`."""
        return {}

    def after_step(self, step: int) -> None:
        """Update the reference after `step` training steps. The default changes nothing."""

    def save(self, folder: Path) -> None:
        """Write the state that `load` needs. The default writes nothing."""

    def load(self, folder: Path) -> None:
        """Load the state that `save` wrote."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSetting:
    policy: Policy
    model: Path  # folder of the policy's initial model
    dtype: torch.dtype
    temperature: float
    logprob_chunk: int
    max_seq_len: int  # number of tokens of the longest possible row
    seed: int
    reads_candidates: bool = False  # whether the loss reads the top_k most likely tokens
    head_dtype: torch.dtype | None = None  # of the output head; None means the model's dtype
    share_prefixes: bool = False  # whether equal beginnings of rows are computed once

    def num_candidates(self, top_k: int) -> int:
        """Return `top_k` (0 if no candidates are read), or raise RunFailed if it is too large."""
        if self.reads_candidates and top_k > self.policy.vocabulary:
            raise RunFailed(
                f"reference.top_k={top_k} exceeds the policy's vocabulary: set reference.top_k="
                f"{self.policy.vocabulary} or less"
            )
        return top_k if self.reads_candidates else 0


@dataclass(frozen=True, kw_only=True)
class NoReference:
    # rl/config/reference_rules.py refuses this class if a run needs a reference.
    has_logprobs: ClassVar[bool] = False


def join_scores(scores: Sequence[Logprobs], transform: Callable[[Tensor], Tensor]) -> Logprobs:
    """Concatenate each field of the scores, skipping None, and apply `transform` to the result."""
    columns = [
        [x for x in column if x is not None]
        for column in zip(
            *((s.logprobs, s.candidates, s.candidate_logprobs) for s in scores), strict=True
        )
    ]
    logprobs, *candidates = [transform(torch.cat(column)) if column else None for column in columns]
    assert logprobs is not None, "every micro-batch has a row"
    return Logprobs(logprobs, *candidates)
