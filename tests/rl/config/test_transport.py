"""Which adapter a model brings, and how its weights then travel."""

import json
import struct

import pytest

from rl.config.transport import Way, transport, transport_problems, way
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


EXTERNAL = {"inference": {"_target_": "rl.inference.external.ExternalServers"}}
SPREAD = {"cluster": {"_target_": "rl.cluster.ray_cluster.RayCluster"}}


@pytest.mark.parametrize("elsewhere", [EXTERNAL, SPREAD], ids=["external", "ray"])
def test_between_hosts_auto_ships_the_adapter_or_everything_by_gloo_and_says_why(elsewhere):
    chosen = way({**composed(), **elsewhere})
    assert chosen.transport == "gloo"
    assert chosen.why.startswith("there is no adapter; ")
    assert "host" in chosen.why
    assert way({**composed("adapter=lora"), **elsewhere}).transport == "adapter"
    assert way({**composed("sync=disk"), **elsewhere}) == Way("disk", "sync=disk")


def refusals(*overrides, **changes):
    return list(transport_problems({**composed(*overrides), **changes}))


def test_a_way_that_the_hosts_do_not_have_is_refused(tmp_path):
    for elsewhere in (EXTERNAL, SPREAD):
        (problem,) = refusals("sync=shm", **elsewhere)
        assert problem.startswith("sync=shm goes through the memory of one host, but ")
        assert problem.endswith("use sync=gloo")
    (problem,) = refusals("sync.transport=nccl")
    assert "sync.transport=nccl moves weights from GPU to GPU and is not built" in problem
    assert refusals("sync=gloo", **SPREAD) == refusals("sync=gloo") == []


def test_the_folder_of_disk_is_one_that_all_see_and_can_be_written(tmp_path):
    assert refusals("sync=disk") == refusals("sync=disk", **SPREAD) == []
    (problem,) = refusals("sync=disk", **EXTERNAL)
    assert problem.startswith("sync=disk needs a folder that all hosts see")
    folder = f"sync.folder={tmp_path}/shared"
    assert refusals("sync=disk", folder, **EXTERNAL) == []
    (tmp_path / "file").touch()
    (problem,) = refusals("sync=disk", f"sync.folder={tmp_path}/file/below")
    assert f"cannot be written ({tmp_path}/file): choose another" in problem


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
