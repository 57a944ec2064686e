"""The sizes of a causal language model, from config.json and the headers of its weight files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.model.folder import files_in_index, json_of, shapes_of, weight_files

GIB = 1 << 30
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL = (
    *("head_dim", "num_key_value_heads", "intermediate_size"),
    *("num_experts", "num_local_experts", "moe_intermediate_size", "num_experts_per_tok"),
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model, from which rl/placement estimates its memory."""

    vocab: int  # number of rows of the embedding matrix
    hidden: int  # width of the residual stream
    inner: int  # width of the feed-forward layer, or the sum of the widths of a token's experts
    query: int  # number of heads times head size
    key: int  # number of key-value heads times head size
    layers: int  # number of decoder layers
    parameters: int  # number of parameters of the whole model
    expert: int = 0  # width of one expert's feed-forward layer, or 0 without experts
    experts: int = 0  # number of experts in each layer

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def largest_weight(self) -> int:
        """The number of elements of vLLM's largest weight: embedding, or fused gate and up_proj."""
        return max(self.embedding, 2 * self.hidden * (self.expert * self.experts or self.inner))

    def row_cache_bytes(self, max_seq_len: int, dtype: str) -> int:
        return 2 * self.layers * self.key * bytes_of(dtype) * max_seq_len

    def cache_gib(self, max_seq_len: int, dtype: str) -> int:
        """Return the GiB of vLLM's key-value cache for one row, rounded up to a whole number."""
        return max(math.ceil(self.row_cache_bytes(max_seq_len, dtype) / GIB), 1)

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Return {Llama's module name: (input width, output width)} of a layer, without experts."""
        attention = {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
        }
        if self.expert:
            return attention
        return {
            **attention,
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def read_sizes(folder: Path) -> Shape | None:
    """Return the sizes of the model in a folder, or None if its config.json is not supported."""
    config = json_of(folder / "config.json")
    listed = files_in_index(folder)  # unlisted files may repeat weights, so do not count them
    counted = sum(
        math.prod(size)
        for path in weight_files(folder)
        if listed is None or path.name in listed
        for size in shapes_of(path).values()
    )
    return shape(config, counted or None)


def shape(config: Mapping[str, Any], parameters: int | None = None) -> Shape | None:
    """Return the sizes in a config.json, or None if a size is missing or a list (one per layer)."""
    config = {**config, **(config.get("text_config") or {})}
    if not all(isinstance(config.get(key), int) for key in _REQUIRED):
        return None
    if not all(isinstance(config.get(key) or 0, int) for key in _OPTIONAL):
        return None
    hidden, layers, heads, vocab = (config[key] for key in _REQUIRED)
    size = config.get("head_dim") or hidden // heads
    query, key = heads * size, (config.get("num_key_value_heads") or heads) * size
    inner, expert = config.get("intermediate_size") or 4 * hidden, 0
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
    matrices = 2 * hidden * (query + key) + 3 * hidden * inner
    if num_experts:
        expert = config.get("moe_intermediate_size") or inner
        inner = expert * (config.get("num_experts_per_tok") or 1)
        matrices = 2 * hidden * (query + key) + num_experts * (3 * hidden * expert + hidden)
    ends = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Shape(
        vocab=vocab,
        hidden=hidden,
        inner=inner,
        query=query,
        key=key,
        layers=layers,
        parameters=parameters or ends + layers * matrices,  # counted, or else estimated
        expert=expert,
        experts=num_experts,
    )
