"""A Qwen3 model small enough to train on two cores, built locally without a download.

By default its tokens are the 256 bytes and Qwen3's control and markup tokens, so the model can
write any text. `prepare` writes no weights, because the trainer initialises them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rl.config.annotations import Node
from rl.config.shipped import SHIPPED

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # token ids 256, 257, 258 of `byte_tokenizer`
# As in Qwen3, these are not special tokens, so decoding keeps them in the text for the parsers.
_MARKUP = ("tool_call", "tool_response", "think")
MARKUP_TOKENS = tuple(f"<{slash}{name}>" for name in _MARKUP for slash in ("", "/"))
_TEMPLATE_FILE = SHIPPED / "models" / "tiny-wiki" / "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The options of conf/model/tiny.yaml."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["bfloat16", "float32"]
    head_dtype: Literal["float32"] | None
    max_seq_len: int
    max_tokens: int
    learning_rate: float
    describe_tools: bool
    rope_theta: float
    tokenizer: Path | None
    warm_start: Node | None

    renderer: ClassVar[str] = "qwen3"
    renderer_options: ClassVar[None] = None
    drawn_by_trainer: ClassVar[bool] = True  # the trainer initialises the weights randomly

    def prepare(self, folder: Path) -> Path:
        """Write config and tokenizer. Raise ValueError if the folder contains another model."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files().items():
            path = folder / name
            if not path.is_file():
                aside = path.with_name(f".{name}")  # so a killed process leaves no partial `path`
                aside.write_text(content, encoding="utf-8")
                aside.replace(path)
            elif path.read_text(encoding="utf-8") != content:
                raise ValueError(
                    f"{folder} contains another model, because {name} differs: delete {folder}, "
                    "or set another run_name"
                )
        return folder

    def _architecture(self) -> dict[str, Any]:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

    def _files(self) -> dict[str, str]:
        tokenizer = byte_tokenizer() if self.tokenizer is None else _read_tokenizer(self.tokenizer)
        end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
        config = {
            **self._architecture(),
            "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,  # next multiple of 64
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            # With the usual 0.02 and rope_theta=1e4, the model learns no word of env=reverse-text
            # in 150 supervised steps. With 0.08 and rope_theta=100, it learns 23-53 % in 120 steps.
            "initializer_range": 0.08,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "max_position_embeddings": max(2048, self.max_seq_len),
            "use_cache": True,
            "dtype": self.dtype,
            "eos_token_id": end,
            "pad_token_id": pad,
        }
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            # Use Qwen3's format without thinking, which equals the format of the renderer "qwen3".
            "chat_template": json.loads(_TEMPLATE_FILE.read_text())["chat_template"],
        }
        # Omit temperature and top_p, because vLLM would use them as defaults for all requests.
        generation_config = {"eos_token_id": [end, pad], "pad_token_id": pad}
        return {
            "config.json": _format_json(config),
            "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
            "tokenizer_config.json": _format_json(tokenizer_config),
            "generation_config.json": _format_json(generation_config),
        }


@dataclass(frozen=True, kw_only=True)
class TinyMoE(TinyModel):
    """A tiny mixture of experts (conf/model/tiny-moe.yaml), with a router and experts per layer."""

    has_experts: ClassVar[bool] = True

    num_experts: int
    experts_per_token: int

    def _architecture(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,  # every layer has experts
            "mlp_only_layers": [],
        }


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer (BPE without merges) with Qwen3's control and markup tokens."""
    vocab = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP_TOKENS])
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ValueError(f"model.tokenizer={path} does not exist: correct it, or set it to null")
    tokenizer = Tokenizer.from_file(str(path))
    special = (*CONTROL_TOKENS, *MARKUP_TOKENS)
    if missing := [token for token in special if tokenizer.token_to_id(token) is None]:
        raise ValueError(f"model.tokenizer={path} lacks {', '.join(missing)}: add these tokens")
    return tokenizer


def byte_letters() -> list[str]:
    """Return the characters that stand for the bytes 0 to 255 in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _format_json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
