"""Token weights: how much one completion token of each rollout counts in the objective. No torch.

    objective = sum over all tokens t of the global batch of  w_t * loss_t

    token_mean         w = 1 / sum_j L_j                      every token counts the same
    sequence_mean      w = 1 / (S * L_i)                      every rollout counts the same
    constant_length    w = 1 / (S * length)                   as token_mean, but for a constant
    prompt_mean        w = 1 / (G * tokens of i's prompt)     every prompt counts the same
    turn_mean          w = 1 / (U * L_iu)                     every turn of every rollout does

L_i: completion tokens of rollout i, L_iu: of its turn u, S: rollouts, G: prompts, U: turns with a
token, each of the *global* batch and
before it is split: value and gradient cannot depend on the micro-batches and ranks it is split
into. The "sequence" of the papers is one sampled episode, a rollout here: where its conversation
forked into several rows, L_i counts the tokens of all of them and all have weight w_i, so that an
episode does not count more for having forked. A rollout without tokens (masked by truncation=mask,
say) has weight 0 and leaves S and G.
A token that a correction or a loss masks keeps its place: the others' weights stay as they are.
"""

from collections import Counter
from collections.abc import Sequence

# Every sequence weighs the same, which losses over whole sequences need (rl/config/facts.py).
PER_SEQUENCE = ("sequence_mean",)
PER_TURN = ("turn_mean",)  # lengths of turns in, a weight for each turn out


def token_mean(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 - one signature for every aggregation
) -> list[float]:
    """Weight [S] of each rollout's tokens: the mean over tokens. DAPO, arXiv:2503.14476."""
    num_tokens = sum(lengths)
    return [1 / num_tokens if length else 0.0 for length in lengths]


def sequence_mean(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 - one signature for every aggregation
) -> list[float]:
    """Weight [S]: the mean over rollouts of the mean over their tokens. GRPO, arXiv:2402.03300."""
    num_rollouts = _num_with_tokens(lengths)
    return [1 / (num_rollouts * length) if length else 0.0 for length in lengths]


def constant_length(
    lengths: Sequence[int],
    group_ids: Sequence[int],  # noqa: ARG001 - one signature for every aggregation
    *,
    length: int,
) -> list[float]:
    """Weight [S]: sums over tokens, divided by a fixed length. Dr.GRPO, arXiv:2503.20783."""
    if length <= 0:
        raise ValueError(f"aggregation.length must be positive, got {length}")
    num_rollouts = _num_with_tokens(lengths)
    return [1 / (num_rollouts * length) if num_tokens else 0.0 for num_tokens in lengths]


def prompt_mean(lengths: Sequence[int], group_ids: Sequence[int]) -> list[float]:
    """Weight [S]: the mean over prompts of the mean over all tokens of their rollouts."""
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
    group_ids: Sequence[int],  # noqa: ARG001 - one signature for every aggregation
) -> list[list[float]]:
    """Weight [S][turns]: the mean over all turns of the mean over the turn's tokens.

    `lengths`: completion tokens of each turn of each rollout. For credit by turn: what a turn
    learns does not depend on how much it said.
    """
    num_turns = sum(map(_num_with_tokens, lengths))
    return [[1 / (num_turns * length) if length else 0.0 for length in turns] for turns in lengths]


def _num_with_tokens(lengths: Sequence[int]) -> int:
    return sum(length > 0 for length in lengths)
