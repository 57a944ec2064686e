"""Which adapter a model brings, and how its weights then travel."""

import json
import struct

import pytest

from rl.config.transport import transport
from rl.inference.server import AdapterRoom, adapter_room
from rl.model.folder import linear_layers
from tests.support.composing import composed

HF = ["model=hf", "model.path=Qwen/Qwen3-0.6B"]
LORA, NONE = "rl.model.lora.LoRA", "rl.model.lora.NoAdapter"


@pytest.mark.parametrize(
    ("overrides", "adapter", "how"),
    [
        ([], NONE, "shm"),
        (["adapter=lora"], LORA, "adapter"),
        (["adapter=lora", "sync=shm"], LORA, "shm"),
        (["adapter=lora", "adapter.modules_to_save=[norm]"], LORA, "shm"),
        (["adapter=lora", "adapter.rank=600"], LORA, "shm"),
        (["adapter=lora", "model.warm_start=null"], LORA, "shm"),
        (HF, LORA, "adapter"),
        (["model=qwen3-0.6b"], LORA, "adapter"),
        ([*HF, "adapter=none"], NONE, "shm"),
        (["adapter=none", "model=qwen3-0.6b"], NONE, "shm"),
    ],
)
def test_a_model_brings_its_adapter_the_command_line_wins_and_auto_ships_the_least(
    overrides, adapter, how
):
    config = composed(*overrides)
    assert config["adapter"]["_target_"] == adapter
    assert transport(config) == how


def test_vllm_gets_room_for_the_layers_that_are_adapted_and_never_for_the_head(tmp_path):
    shapes = {
        "model.embed_tokens.weight": [9, 4],
        "model.layers.0.mlp.up_proj.weight": [8, 4],
        "model.layers.0.self_attn.q_proj.weight": [4, 4],
        "model.norm.weight": [4],
        "lm_head.weight": [9, 4],
    }
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    node = composed("adapter=lora", "adapter.rank=9")["adapter"]
    assert linear_layers(tmp_path) == ["q_proj", "up_proj"]
    assert adapter_room("shm", node, tmp_path) is None
    assert adapter_room("adapter", node, tmp_path) == AdapterRoom(16, ["q_proj", "up_proj"])
    some = {**node, "target_modules": ["layers.1.mlp.up_proj", "v_proj"]}
    assert adapter_room("adapter", some, tmp_path) == AdapterRoom(16, ["up_proj", "v_proj"])
