"""The input and output of a model that scores tokens: a reference, a teacher, the policy.

B: rows, T: padded length, N: completion tokens, K: candidates of each.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens padded on the right, and a mask of the tokens to score."""

    token_ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, N of them True
    envs: tuple[str, ...]  # [B] the environment that each row was played in; "" for none


@dataclass(frozen=True, eq=False)
class Scores:
    """The logprobs of the N tokens in the mask, row by row, without gradient."""

    logprobs: Tensor  # [N]
    # The K most likely tokens at each of these positions, if the loss compares distributions:
    candidates: Tensor | None = None  # [N, K] token ids
    candidate_logprobs: Tensor | None = None  # [N, K] falling
