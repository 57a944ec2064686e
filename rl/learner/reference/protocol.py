"""What the trainer asks of a reference, and what it is made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from rl.learner.policy import Policy
from rl.learner.rows import Rows, Scores
from rl.run.failure import RunFailed


class Reference(Protocol):
    """All ranks call every method together."""

    def score(self, batches: Sequence[Rows]) -> list[Scores]:
        """What it thinks of each one's completion tokens, at the sampler's temperature."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is worth knowing of the last call."""
        ...

    def after_step(self, step: int) -> None:
        """`step` steps are done."""
        ...

    def save(self, folder: Path) -> None:
        """Write what cannot be loaded from elsewhere."""
        ...

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReferenceSetting:
    """What a reference may be made from."""

    policy: Policy
    model: Path  # folder the policy started from
    dtype: torch.dtype
    temperature: float
    logprob_chunk: int
    max_seq_len: int  # tokens of the longest row
    seed: int
    vocabulary: int  # tokens that the policy knows
    reads_candidates: bool = False  # the loss compares distributions
    head_dtype: torch.dtype | None = None  # of the policy's output head, if not the model's

    def num_candidates(self, top_k: int) -> int:
        """`top_k`, or 0 where nobody looks at candidates.

        Raises:
            RunFailed: there are not so many tokens.

        """
        if self.reads_candidates and top_k > self.vocabulary:
            raise RunFailed(
                f"reference.top_k={top_k} is more than the {self.vocabulary} tokens that the "
                "policy knows: lower it"
            )
        return top_k if self.reads_candidates else 0


class Unchanging:
    """A reference that never changes and comes from elsewhere."""

    def metrics(self) -> dict[str, float]:
        """Nothing to know."""
        return {}

    def after_step(self, step: int) -> None:
        """Nothing happens."""

    def save(self, folder: Path) -> None:
        """Nothing to keep."""

    def load(self, folder: Path) -> None:
        """Nothing was kept."""


@dataclass(frozen=True, kw_only=True)
class NoReference:
    """conf/reference/none.yaml."""

    has_logprobs: ClassVar[bool] = False

    def start(self, setting: ReferenceSetting) -> Reference:  # noqa: ARG002 one signature for all
        """Nothing may ask for one."""
        raise AssertionError("rl/config/algorithm_rules.py refuses what needs a reference here")
