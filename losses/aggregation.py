"""The weight w_t that each completion token has in the objective, computed without torch.

    objective = sum over all tokens t of the global batch of  w_t * loss_t

    token_mean         w = 1 / sum_j L_j                      every token counts the same
    sequence_mean      w = 1 / (S * L_i)                      every rollout counts the same
    constant_length    w = 1 / (S * length)                   the option `length` replaces L_i
    prompt_mean        w = 1 / (G * L_g)                      every prompt counts the same
    turn_mean          w = 1 / (U * L_iu)                     every turn counts the same

L counts completion tokens: L_i of rollout i, L_g of all rollouts of i's prompt, L_iu of i's turn u.
S: rollouts, G: prompts, U: turns that have a token. All are counted in the *global* batch before it
is split into micro-batches, so that the objective and its gradient do not depend on the split. A
"sequence" of the papers is a whole rollout here, and a prompt is one role of a group. A rollout
without tokens (for example after truncation=mask) has weight 0 and does not count in S. A prompt
without tokens does not count in G. A token masked by a correction or a loss still counts in L.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta


def token_mean(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
) -> list[float]:
    """Return token weights [rollouts] that average over all tokens. DAPO, arXiv:2503.14476."""
    num_tokens = sum(lengths)
    return [1 / num_tokens if length else 0.0 for length in lengths]


def sequence_mean(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
) -> list[float]:
    """Return token weights [rollouts] that average over each rollout's tokens, then over rollouts.

    GRPO, arXiv:2402.03300.
    """
    num_rollouts = _num_with_tokens(lengths)
    return [1 / (num_rollouts * length) if length else 0.0 for length in lengths]


def constant_length(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
    *,
    length: Annotated[int, Meta(ge=1)],
) -> list[float]:
    """Return token weights [rollouts] that average (sum of losses) / `length` over the rollouts.

    Dr.GRPO, arXiv:2503.20783.
    """
    num_rollouts = _num_with_tokens(lengths)
    return [1 / (num_rollouts * length) if num_tokens else 0.0 for num_tokens in lengths]


def prompt_mean(lengths: Sequence[int], group_ids: Sequence[int]) -> list[float]:
    """Return token weights [rollouts] that average over each prompt's tokens, then over prompts."""
    tokens_of: Counter[int] = Counter()
    for length, group_id in zip(lengths, group_ids, strict=True):
        tokens_of[group_id] += length
    num_prompts = sum(tokens > 0 for tokens in tokens_of.values())
    return [
        1 / (num_prompts * tokens_of[group_id]) if length else 0.0
        for length, group_id in zip(lengths, group_ids, strict=True)
    ]


def turn_mean(
    lengths: Sequence[Sequence[int]],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
) -> list[list[float]]:
    """Return token weights that average over each turn's tokens, then over turns.

    The lengths (in completion tokens) and the weights are lists of turns, one list per rollout.
    """
    num_turns = sum(map(_num_with_tokens, lengths))
    return [[1 / (num_turns * length) if length else 0.0 for length in turns] for turns in lengths]


def _num_with_tokens(lengths: Sequence[int]) -> int:
    return sum(length > 0 for length in lengths)
