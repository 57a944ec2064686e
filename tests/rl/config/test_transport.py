"""Which sender a configuration chooses, and which hosts and policies cannot use it."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.config.build import build
from rl.config.transport import transport, transport_problems
from rl.inference.server import AdapterLimits, adapter_limits
from rl.model.folder import linear_layers
from tests.support.composing import composed
from tests.support.own_sync import RequestSender

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
        (["sync=gloo"], NONE, "gloo"),
        (["adapter=lora", "sync=ipc"], LORA, "ipc"),
        (["sync=nccl"], NONE, "nccl"),
    ],
)
def test_the_command_line_has_priority_and_auto_pushes_the_least(overrides, adapter, how):
    config = composed(*overrides)
    assert config["adapter"]["_target_"] == adapter
    chosen = transport(config)
    assert (chosen.name, chosen.has("adapter_only")) == (how, how == "adapter")
    assert build(chosen.node)().probe_rows == 4


@pytest.mark.parametrize("name", ["adapter", "gloo", "ipc", "nccl", "shm"])
def test_the_check_reads_the_class_variables_that_python_inherits(name):
    chosen = transport(composed(f"sync={name}", *(["adapter=lora"] * (name == "adapter"))))
    sender = build(chosen.node)()
    for key in ("is_placeholder", "adapter_only", "one_host", "reader_copy", "on_gpus", "own_gpus"):
        assert chosen.has(key) == getattr(sender, key), key


EXTERNAL = {"inference": {"_target_": "rl.inference.external.ExternalServers"}}
SPREAD = {"cluster": {"_target_": "rl.cluster.ray_cluster.RayCluster"}}


OWN = "sync._target_=tests.support.own_sync.RequestSender"


def refusals(*overrides, **changes):
    return list(transport_problems({**composed(*overrides), **changes}))


def test_a_user_adds_a_sender_by_its_target():
    chosen = transport(composed(OWN))
    assert (chosen.name, chosen.has("adapter_only")) == ("own_sync", False)
    assert isinstance(build(chosen.node)(), RequestSender)
    assert refusals(OWN) == refusals(OWN, **SPREAD) == []


def test_between_hosts_a_sender_for_one_host_is_refused_and_auto_pushes_the_adapter_or_by_gloo():
    for elsewhere in (EXTERNAL, SPREAD):
        assert transport({**composed(), **elsewhere}).name == "gloo"
        assert transport({**composed("adapter=lora"), **elsewhere}).name == "adapter"
        for name in ("shm", "ipc"):
            (problem,) = refusals(f"sync={name}", **elsewhere)
            assert problem.startswith(f"sync={name} needs trainer and vLLM on one host, but ")
            assert problem.endswith("use sync=gloo")
    for name in ("gloo", "nccl"):
        assert refusals(f"sync={name}", **SPREAD) == refusals(f"sync={name}") == []


def test_vllm_reserves_memory_for_adapted_layers_and_never_for_the_head_or_experts(tmp_path):
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens": [9, 4], f"{layer}.mlp.up_proj": [8, 4],
        f"{layer}.self_attn.q_proj": [4, 4], "model.norm": [4], "lm_head": [9, 4],
    }  # fmt: skip
    _write_weights(tmp_path, shapes)
    assert linear_layers(tmp_path) == ["q_proj", "up_proj"]
    assert adapter_limits(9, "all-linear", tmp_path) == AdapterLimits(16, ["q_proj", "up_proj"])
    some = ["layers.1.mlp.up_proj", "v_proj"]
    assert adapter_limits(9, some, tmp_path) == AdapterLimits(16, ["up_proj", "v_proj"])
    shapes = {
        f"{layer}.mlp.experts.0.up_proj": [8, 4], f"{layer}.mlp.gate": [2, 4],
        f"{layer}.mlp.shared_expert.up_proj": [8, 4], f"{layer}.self_attn.q_proj": [4, 4],
    }  # fmt: skip
    _write_weights(tmp_path, shapes)
    assert linear_layers(tmp_path) == ["q_proj"]


def _write_weights(folder, shapes):
    tensors = {f"{name}.weight": np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
