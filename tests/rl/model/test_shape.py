"""Sizes of a model, read from its folder without loading it."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl.model.shape import read_sizes, shape
from tests.support.scripted import tiny_model
from tests.support.tiny_policy import model_folder


def test_parameters_of_a_model_without_weights_are_those_it_will_have(tmp_path):
    folder = tiny_model(tmp_path)
    sizes = read_sizes(folder)
    assert sizes is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert sizes.parameters == matrices  # norms are not worth counting
    linear = {
        name.rpartition(".")[2]: tuple(reversed(module.weight.shape))
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert sizes.linear_layers() == linear


def test_parameters_of_a_mixture_are_counted_with_all_experts_and_the_router(tmp_path):
    folder = model_folder(tmp_path / "model", num_experts=4, experts_per_token=2)
    sizes = read_sizes(folder)
    assert sizes is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert sizes.parameters == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert (sizes.expert, sizes.inner) == (32, 64)  # width of one expert, and of those of a token
    assert sizes.linear_layers().keys() == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("files", [1, 2])
def test_weights_that_are_there_are_counted(files, tmp_path):
    config = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number in range(files):
        tensors = {f"w{number}": torch.zeros(3, 5), "norm": torch.zeros(4)}
        save_file(tensors, tmp_path / f"{number}.safetensors", metadata={"format": "pt"})
    sizes = read_sizes(tmp_path)
    assert sizes is not None
    assert sizes.parameters == files * 19


def test_another_copy_of_the_weights_beside_the_shards_is_not_counted(tmp_path):
    folder = tiny_model(tmp_path)
    save_file({"a": torch.zeros(3, 5)}, folder / "model-00001-of-00001.safetensors")
    save_file({"a": torch.zeros(3, 5)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = read_sizes(folder)
    assert sizes is not None
    assert sizes.parameters == 15


@pytest.mark.parametrize("key", ["intermediate_size", "moe_intermediate_size"])
def test_sizes_that_differ_by_layer_are_not_guessed(key, tmp_path):
    config = json.loads((tiny_model(tmp_path) / "config.json").read_text())
    assert shape(config | {"text_config": None}) is not None
    assert shape(config | {key: [512, 1024]}) is None
