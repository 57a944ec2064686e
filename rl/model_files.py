"""Models in Hugging Face form: read from a folder, written to one."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")


def holds_weights(folder: Path) -> bool:
    """True unless the model in the folder is but a config, to be initialised."""
    return any(folder.glob("*.safetensors"))


def load_model(folder: Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load a local model folder; one without weights is initialised from its config and `seed`."""
    if holds_weights(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return model


def write_model(
    model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, source: Path
) -> None:
    """Write `weights` in the form of `model` to `folder`, with the tokenizer files of `source`."""
    model.save_pretrained(folder, state_dict=dict(weights))
    copy_tokenizer(source, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what goes with the model in `source` and is neither its weights nor their index."""
    for path in source.iterdir():
        of_weights = path.name == "config.json" or path.name.endswith(".index.json")
        wanted = path.suffix in _TOKENIZER_FILES and not of_weights
        if wanted and not (folder / path.name).exists():
            shutil.copy2(path, folder)
