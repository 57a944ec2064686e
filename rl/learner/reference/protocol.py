"""What the trainer asks of a reference, and what a reference is built from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from rl.learner.logprobs import Rows, Scored
from rl.learner.policy import Policy
from rl.runtime.failure import RunFailed


class Reference:
    """The base class of references. All ranks call every method together."""

    def score(self, batches: Sequence[Rows]) -> list[Scored]:
        """Score each micro-batch's completion tokens at the sampler's temperature."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last call of `score`."""
        return {}

    def after_step(self, step: int) -> None:
        """Follow the policy after `step` optimizer steps; by default do not change."""

    def save(self, folder: Path) -> None:
        """Write what cannot be loaded from elsewhere."""

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSetting:
    """What a reference may be built from."""

    policy: Policy
    model: Path  # the folder that the policy started from
    dtype: torch.dtype
    temperature: float
    logprob_chunk: int
    max_seq_len: int  # tokens of the longest row
    seed: int
    vocabulary: int  # number of tokens that the policy knows
    reads_candidates: bool = False  # the loss compares distributions
    head_dtype: torch.dtype | None = None  # of the policy's output head, None for the model's

    def num_candidates(self, top_k: int) -> int:
        """Return `top_k`, or 0 if the loss does not compare distributions.

        Raises:
            RunFailed: the policy knows fewer tokens.

        """
        if self.reads_candidates and top_k > self.vocabulary:
            raise RunFailed(
                f"reference.top_k={top_k} is more than the {self.vocabulary} tokens that the "
                "policy knows: lower it"
            )
        return top_k if self.reads_candidates else 0


@dataclass(frozen=True, kw_only=True)
class NoReference:
    """conf/reference/none.yaml."""

    has_logprobs: ClassVar[bool] = False

    def start(self, setting: ReferenceSetting) -> Reference:  # noqa: ARG002 as other references
        """Fail: the configuration check refuses what reads a reference."""
        raise AssertionError("rl/config/algorithm_rules.py refuses what needs a reference here")


def joined(scores: Sequence[Scored], place: Callable[[Tensor], Tensor]) -> Scored:
    """Concatenate scores and pass each tensor through `place`; candidates may be missing."""
    columns = [
        [x for x in column if x is not None]
        for column in zip(
            *((s.logprobs, s.candidates, s.candidate_logprobs) for s in scores), strict=True
        )
    ]
    logprobs, *candidates = [place(torch.cat(column)) if column else None for column in columns]
    assert logprobs is not None, "a micro-batch has a row"
    return Scored(logprobs, *candidates)
