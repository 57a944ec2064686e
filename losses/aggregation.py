"""Token weights: the weight of one completion token of each rollout in the objective. No torch.

    objective = sum over all tokens t of the global batch of  w_t * loss_t

    token_mean         w = 1 / sum_j L_j                      every token counts the same
    sequence_mean      w = 1 / (S * L_i)                      every rollout counts the same
    constant_length    w = 1 / (S * length)                   a constant instead of L_i
    prompt_mean        w = 1 / (G * tokens of i's prompt)     every prompt counts the same
    turn_mean          w = 1 / (U * L_iu)                     every turn counts the same

L_i: completion tokens of rollout i, L_iu: of its turn u, S: rollouts, G: prompts, U: turns with a
token. All are counted in the *global* batch before the split, so that value and gradient do not
depend on the micro-batches and ranks. The "sequence" of the papers is one sampled episode, a
rollout here. If its conversation forked into several rows, L_i counts the tokens of all rows, so
that a fork does not change the weight of the episode. A rollout without tokens (for example after
truncation=mask) has weight 0 and does not count in S and G. A token that a correction or a loss
masks still counts, so that the other weights do not change.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta


def token_mean(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
) -> list[float]:
    """Return weights [S] for the mean over tokens. DAPO, arXiv:2503.14476."""
    num_tokens = sum(lengths)
    return [1 / num_tokens if length else 0.0 for length in lengths]


def sequence_mean(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
) -> list[float]:
    """Return weights [S] for the mean over rollouts of token means. GRPO, arXiv:2402.03300."""
    num_rollouts = _num_with_tokens(lengths)
    return [1 / (num_rollouts * length) if length else 0.0 for length in lengths]


def constant_length(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 (all aggregations share one signature)
    *,
    length: Annotated[int, Meta(ge=1)],
) -> list[float]:
    """Return weights [S] for sums over tokens divided by a fixed length. arXiv:2503.20783."""
    num_rollouts = _num_with_tokens(lengths)
    return [1 / (num_rollouts * length) if num_tokens else 0.0 for num_tokens in lengths]


def prompt_mean(lengths: Sequence[int], group_ids: Sequence[int]) -> list[float]:
    """Return weights [S] for the mean over prompts of the mean over all tokens of a prompt."""
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
    """Return weights [S][turns] for the mean over all turns of the mean over a turn's tokens.

    `lengths` are the completion tokens of each turn of each rollout. Use it with advantages per
    turn, so that the weight of a turn does not depend on its length.
    """
    num_turns = sum(map(_num_with_tokens, lengths))
    return [[1 / (num_turns * length) if length else 0.0 for length in turns] for turns in lengths]


def _num_with_tokens(lengths: Sequence[int]) -> int:
    return sum(length > 0 for length in lengths)
