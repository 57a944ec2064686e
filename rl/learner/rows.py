"""What is scored, and what comes back.

B: rows, T: padded length, N: completion tokens, K: candidates of each.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens padded on the right, and which of them count."""

    token_ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, N of them True
    envs: tuple[str, ...]  # [B] the environment that each was played in; "" for none


@dataclass(frozen=True, eq=False)
class Scores:
    """What a model thinks of the N tokens that count, row by row, without gradient."""

    logprobs: Tensor  # [N]
    # Its K most likely tokens at each of these places, where somebody compares distributions:
    candidates: Tensor | None = None  # [N, K] token ids
    candidate_logprobs: Tensor | None = None  # [N, K] falling
