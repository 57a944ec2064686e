"""Compute equal beginnings of rows only once, with the same result.

Rows of a group share their prompt, and rows of a forked rollout share their history. In a causal
model the hidden state of a token depends only on the tokens up to it. So rows that begin with the
same tokens have the same states there, and the model computes each distinct beginning once:

1. `pack` sorts the rows by their token ids. From each row it drops the beginning that the row
   shares with the preceding row. The tokens that remain are the packed tokens. They are the nodes
   of the trie of all rows, in depth-first order.
2. Embedding, norms and linear layers process the packed tokens as one row.
3. The attention copies queries, keys and values of the packed tokens into complete rows. There it
   computes causal attention as usual, without a [P, P] mask, and keeps one copy of each packed
   token's output. A row that is the beginning of another row needs no complete row of its own. So
   the complete rows are the leaves of the trie.

`share_prefixes` does not change models whose result would differ.

B: rows, T: padded length, N: completion tokens, P: packed tokens, S: leaves of a block (`_blocks`),
W: length of the block's longest leaf, H: hidden size.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rl.model.loading import FLOAT32_ATTENTION_LEN

log = logging.getLogger(__name__)

_NAME = "shared_prefixes"
_MIN_SHARED_TOKENS = 256  # sharing fewer tokens saves less than an attention mask costs
_EXACT_LAYERS = {"full_attention", "sliding_attention"}
_TEST_ROWS = np.array([[1, 2, 3, 4, *ends] for ends in ((5, 6, 7, 8), (5, 6, 8, 7), (9, 9, 9, 9))])


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows packed so that each distinct beginning is stored once. The arrays have dtype int64."""

    token_ids: np.ndarray  # [P]
    positions: np.ndarray  # [P] position of each token in its rows
    # One item per block, the leaves of one attention call: the packed indices [S, W] of its tokens,
    # 0 at padding, and the first column to compute. Earlier blocks compute the preceding columns.
    leaves: list[tuple[np.ndarray, int]]
    copies: np.ndarray  # [P] index of each packed token in the joined outputs of all blocks
    before: np.ndarray  # [N] index of the packed token before each completion token, row by row


def pack(token_ids: np.ndarray, mask: np.ndarray) -> PackedRows:
    """Pack the rows `token_ids` [B, T]. `mask` [B, T] is True at completion tokens.

    Cut each row before its last completion token, because later states predict no completion
    token. A row without completion tokens keeps its first token.
    """
    columns = np.arange(token_ids.shape[1])
    lengths = np.maximum((mask * columns).max(1), 1)  # [B]
    # Padding is 0 and sorts before every token, so a row precedes the rows that extend it.
    keys = np.where(columns < lengths[:, None], token_ids + 1, 0).astype(">u4")  # [B, T]
    order = np.array(sorted(range(len(keys)), key=lambda row: keys[row].tobytes()))
    keys, lengths = keys[order], lengths[order]
    differs = np.pad(keys[1:] != keys[:-1], ((1, 0), (0, 1)), constant_values=True)
    shared = np.minimum(differs.argmax(1), lengths)  # [B] tokens shared with the preceding row
    starts = np.cumsum(lengths - shared) - (lengths - shared)  # [B] index of first unshared token
    is_own = (columns >= shared[:, None]) & (columns < lengths[:, None])  # [B, T] not shared
    # The owner of a token is the row that stores it: the token's row if the token is unshared, else
    # the last earlier row in which the token's column is unshared.
    numbers = np.where(columns >= shared[:, None], np.arange(len(keys))[:, None], 0)
    owners = np.maximum.accumulate(numbers)  # [B, T]
    index = (starts - shared)[owners] + columns  # [B, T] packed index of each token
    is_leaf = np.append(shared[1:] < lengths[:-1], True)  # [B]
    leaves, copies, start = [], np.empty(is_own.sum(), np.int64), 0
    for rows, first, width in _blocks(np.flatnonzero(is_leaf), lengths, shared):
        exists = columns[:width] < lengths[rows, None]  # [S, W]
        of_leaves = np.where(exists, index[rows, :width], 0)
        leaves.append((of_leaves, first))
        computed = exists[:, first:]
        copies[of_leaves[:, first:][computed]] = start + np.flatnonzero(computed)
        start += computed.size
    by_row = np.empty_like(index)
    by_row[order] = index
    return PackedRows(
        token_ids=keys[is_own].astype(np.int64) - 1,
        positions=np.broadcast_to(columns, keys.shape)[is_own],
        leaves=leaves,
        copies=copies,
        before=by_row[:, :-1][mask[:, 1:]],
    )


def _blocks(
    leaves: np.ndarray, lengths: np.ndarray, shared: np.ndarray
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield blocks as (leaves, first column to compute, width), with leaves of similar lengths.

    If consecutive leaves share at least half of their tokens, and at least _MIN_SHARED_TOKENS, a
    separate block computes the shared tokens once for all these leaves.
    """
    # `common` counts tokens that a leaf shares with the preceding leaf and all rows in between.
    common = np.minimum.reduceat(shared, np.append(0, leaves[:-1] + 1))
    is_first = common < np.maximum(_MIN_SHARED_TOKENS, lengths[leaves] / 2)
    is_first[0] = True
    families = np.split(np.arange(len(leaves)), np.flatnonzero(is_first)[1:])
    alone = np.concatenate([leaves[:0], *(f for f in families if len(f) == 1)])
    sharing = [(f, common[f[1:]].min()) for f in families if len(f) > 1]
    for members, first in [(alone, 0), *sharing]:
        if first:
            yield leaves[members[:1]], 0, int(first)
        rows = leaves[members]
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        while len(rows):
            # Let a block's shortest leaf have at least three quarters of its longest leaf's length.
            number = int((lengths[rows] >= 0.75 * lengths[rows[0]]).sum())
            yield rows[:number], int(first), int(lengths[rows[0]])
            rows = rows[number:]


def states_before(body: Any, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the hidden state [N, H] one position before each token where `mask` is True.

    `token_ids` and `mask` are [B, T]. Rows are padded on the right. They need no attention mask,
    because causal attention hides the padding from all real tokens.
    """
    if not shares_prefixes(body):
        hidden = body(input_ids=token_ids, use_cache=False).last_hidden_state
        return hidden[:, :-1][mask[:, 1:]]
    packed = pack(token_ids.cpu().numpy(), mask.cpu().numpy())

    def on_device(values: np.ndarray) -> Tensor:
        # Without non_blocking=True the host would wait for all earlier work of the GPU.
        return torch.from_numpy(values).to(mask.device, non_blocking=True)

    hidden = body(
        input_ids=on_device(packed.token_ids)[None],
        position_ids=on_device(packed.positions)[None],
        use_cache=False,
        layout=_Layout(
            [(on_device(index), first) for index, first in packed.leaves], on_device(packed.copies)
        ),
    ).last_hidden_state[0]
    # Select in float32, because bfloat16 would round the sum of the gradients of a shared state.
    return _promote(hidden).index_select(0, on_device(packed.before)).to(hidden.dtype)


def shares_prefixes(model: Any) -> bool:
    """Return whether `share_prefixes` was called on the model and succeeded."""
    return model.config._attn_implementation == _NAME


def share_prefixes(model: PreTrainedModel) -> None:
    """Make `states_before` compute shared beginnings once, or log why the model prevents it."""
    before: Any = model.config._attn_implementation
    training = model.training
    reason = _obstacle(model)
    if not reason:
        AttentionInterface.register(_NAME, _attend)
        try:
            plain = _states_of_test_rows(model.eval())
            model.set_attn_implementation(_NAME)
            gap = float((_states_of_test_rows(model) - plain).abs().max() / plain.abs().max())
        # Catch any error, because the model may still work without shared prefixes.
        except Exception as error:  # noqa: BLE001
            reason = f"the check of the model's hidden states failed ({error!r})"
        else:
            limit = 0.05 if plain.dtype in (torch.bfloat16, torch.float16) else 1e-4
            reason = "" if gap <= limit else f"hidden states would change by {gap:.1g} (relative)"
            if not shares_prefixes(model):  # transformers has kept the model's own attention
                reason = "the model's attention cannot be replaced"
        model.train(training)
    if reason:
        model.set_attn_implementation(before)
        log.warning("trainer.share_prefixes=true has no effect, because %s", reason)


def _obstacle(model: PreTrainedModel) -> str:
    """Return why sharing would change this model's results, or "" if no reason is known."""
    layers = set(getattr(model.config, "layer_types", None) or ()) - _EXACT_LAYERS
    if layers:
        return f"the model has layers of the type {min(layers)}, whose results would change"
    for name, module in model.named_modules():
        noise = [v for k, v in vars(module).items() if k == "attention_dropout" or "jitter" in k]
        if isinstance(module, nn.Dropout):
            noise.append(module.p)
        if any(noise):
            return f"{name} adds noise to every row (dropout or jitter)"
    return ""


@torch.no_grad()
def _states_of_test_rows(model: PreTrainedModel) -> Tensor:
    token_ids = torch.from_numpy(_TEST_ROWS).to(model.device)
    return states_before(model.base_model, token_ids, torch.ones_like(token_ids, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class _Layout:
    leaves: list[tuple[Tensor, int]]  # for each block, as in PackedRows
    copies: Tensor  # [P]


# Do not compile this function, because torch would recompile it for each new number of blocks.
@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: Tensor,  # [1, heads, P, size]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 None, because transformers makes no mask
    *args: Any,
    layout: _Layout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    # Copy in float32, because bfloat16 would round the sum of the gradients of a shared token.
    packed = [_promote(x[0].transpose(0, 1)) for x in (query, key, value)]  # [P, heads, size] each
    outputs = []
    for index, first in layout.leaves:
        is_short = index.shape[1] <= FLOAT32_ATTENTION_LEN and query.device.type == "cpu"
        inside = packed[0].dtype if is_short else query.dtype
        queries, keys, values = (
            x.flatten(1)
            .index_select(0, index.flatten())
            .view(*index.shape, *x.shape[1:])
            .transpose(1, 2)
            .to(inside)  # [S, heads, W, size]
            for x in packed
        )
        mask = _mask(first, index.shape[1], kwargs.get("sliding_window"), query.device)
        attended, _ = sdpa_attention_forward(
            module, queries[:, :, first:], keys, values, mask, *args, **kwargs
        )
        outputs.append(attended.flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.copies)[None].to(query.dtype), None


def _mask(first: int, width: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the attention mask [1, 1, W - first, W], or None if sdpa's causal mask is enough."""
    window = window or width
    if first == 0 and window >= width:
        return None
    columns = torch.arange(width, device=device)
    distance = columns[first:, None] - columns  # [W - first, W]
    return ((distance >= 0) & (distance < window))[None, None]


def _promote(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
