"""The sizes of a causal language model, from its config.json and the headers of its weights."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.model.folder import weight_files

GIB = 1 << 30
_LARGE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OTHERS = (
    *("head_dim", "num_key_value_heads", "intermediate_size"),
    *("num_experts", "num_local_experts", "moe_intermediate_size", "num_experts_per_tok"),
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that memory follows from.

    Attributes:
        vocab: rows of the embedding.
        hidden: of the residual stream.
        inner: of the feed-forward part, of all experts that a token goes through.
        query: heads times their size.
        key: key-value heads times their size.
        layers: of the decoder.
        parameters: of the whole model.
        expert: inner size of one expert; 0 where there are none.

    """

    vocab: int
    hidden: int
    inner: int
    query: int
    key: int
    layers: int
    parameters: int
    expert: int = 0

    @property
    def embedding(self) -> int:
        """Parameters of one matrix with a row per word."""
        return self.vocab * self.hidden

    def row_bytes(self, max_seq_len: int, dtype: str) -> int:
        """Keys and values of one row: a cache that holds less, and vLLM does not start."""
        return 2 * self.layers * self.key * bytes_of(dtype) * max_seq_len

    def cache_gib(self, max_seq_len: int, dtype: str) -> int:
        """GiB of a cache that holds at least one row."""
        return max(math.ceil(self.row_bytes(max_seq_len, dtype) / GIB), 1)

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each matrix of a layer, by the names that Llama gave them."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }


def bytes_of(dtype: str) -> int:
    """Return those of one number, as model.dtype has it."""
    return 2 if dtype == "bfloat16" else 4


def shape_of(folder: Path) -> Shape | None:
    """Return the sizes of the model in a folder; None for a kind whose config has other keys."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return shape(config, sum(_counts(folder)) or None)


def shape(config: Mapping[str, Any], parameters: int | None = None) -> Shape | None:
    """Return the sizes that a config.json says; `parameters` where they were counted."""
    config = {**config, **(config.get("text_config") or {})}
    if not all(isinstance(config.get(key), int) for key in _LARGE):
        return None
    if not all(isinstance(config.get(key) or 0, int) for key in _OTHERS):  # a list: by layer
        return None
    hidden, layers, heads, vocab = (config[key] for key in _LARGE)
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
        parameters=parameters or ends + layers * matrices,
        expert=expert,
    )


def _counts(folder: Path) -> Iterator[int]:
    """Numbers in each tensor of the weights that are loaded; beside them may lie another copy."""
    index = folder / "model.safetensors.index.json"
    listed = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
    for path in weight_files(folder):
        if listed is not None and path.name not in listed:
            continue
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        yield from (math.prod(form["shape"]) for key, form in header.items() if key[:2] != "__")
