"""Models in Hugging Face form: read from a folder, written to one."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl.attention import suit_cpu
from rl.model_folder import copy_tokenizer, holds_weights


def load_model(folder: Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load a local model folder; one without weights is initialised from its config and `seed`."""
    if holds_weights(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    else:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(dtype)
    if not torch.cuda.is_available():
        suit_cpu(model)
    return model


def write_model(
    model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, source: Path
) -> None:
    """Write `weights` in the form of `model` to `folder`, with the tokenizer files of `source`."""
    model.save_pretrained(folder, state_dict=dict(weights))
    copy_tokenizer(source, folder)
