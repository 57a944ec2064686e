"""Which sender a configuration chooses, and which hosts and policies cannot use it."""

import pytest

from rl.config.build import build
from rl.config.transport import transport, transport_problems
from tests.support.composing import composed
from tests.support.own_sync import RequestSender

HF = ["model=hf", "model.path=Qwen/Qwen3-0.6B"]
LORA, NONE = "rl.model.lora.LoRA", "rl.model.lora.NoAdapter"


@pytest.mark.parametrize(
    ("overrides", "adapter", "how"),
    [
        (["adapter=lora"], LORA, "adapter"),
        (["adapter=lora", "sync=shm"], LORA, "shm"),
        (HF, LORA, "adapter"),
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
    sender = build(chosen.node)()
    assert sender.probe_rows == 4
    for key in ("is_placeholder", "one_host", "reader_copy", "on_gpus", "own_gpus"):
        assert chosen.has(key) == getattr(sender, key), key  # the check imports no sender


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
