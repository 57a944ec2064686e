"""Load a model in Hugging Face format, prepare its layers for training, and save it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.model.folder import copy_tokenizer, holds_weights

_NAME = "sdpa_float32"
FLOAT32_ATTENTION_LEN = 512  # CPUs compute attention of rows up to this length faster in float32


def use_float32_attention(model: PreTrainedModel) -> None:
    AttentionInterface.register(_NAME, _compute_attention)
    # transformers looks up attention function and mask function by the same name.
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _compute_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:  # query, key, value: [rows, heads, tokens, head size]
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[2] > FLOAT32_ATTENTION_LEN:
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    attended, _ = sdpa_attention_forward(
        module, query.float(), key.float(), value.float(), *args, **kwargs
    )
    return attended.to(query.dtype), None


def load_model(folder: Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load a model folder. If it has no weights, initialise them randomly with `seed`."""
    if holds_weights(folder):
        options: Any = {"local_files_only": True, "trust_remote_code": False, "dtype": dtype}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **options
        )
        model, info = loaded
        if lost := sorted(info["missing_keys"]):
            raise ValueError(f"{folder} lacks weights, such as {lost[0]}: download it again")
        if bad := [n for n, weight in model.named_parameters() if not weight.isfinite().all()]:
            raise ValueError(f"{folder}: {bad[0]} contains NaN or infinity: use another model")
    else:
        # Initialise in float32, so that a seed gives the same weights in every dtype.
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
        # Only parameters get the dtype. Buffers (rotary frequencies) must stay float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if not torch.cuda.is_available():
        use_float32_attention(model)
    return model


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    # With use_reentrant=True, frozen embeddings (LoRA) would leave all layers without gradients.
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile the decoder layers for inputs of any shape. Raise ValueError if there are none."""
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"{kind} has no layers that can be compiled: set trainer.compile=false")
    embedding = model.get_input_embeddings()
    if not any(parameter.requires_grad for parameter in embedding.parameters()):
        # Let the first layer's inputs require gradients, too, so that all layers share one graph.
        embedding.register_forward_hook(
            lambda module, given, made: made.requires_grad_() if torch.is_grad_enabled() else made  # noqa: ARG005
        )
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)


def write_model(
    model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, source: Path
) -> None:
    """Save `weights` to `folder` with the config of `model` and the tokenizer files of `source`."""
    # Copy the generation config's file, because transformers refuses to save some loaded configs.
    model.generation_config = type(model.generation_config)()
    model.save_pretrained(folder, state_dict=dict(weights))
    (folder / "generation_config.json").unlink(missing_ok=True)
    copy_tokenizer(source, folder)
