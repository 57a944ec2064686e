"""A real run ends with an error in the step in which vLLM does not load one layer of a push."""

import pytest

from rl.runtime.folder import RunFolder
from tests.support.launching import Launcher
from tests.support.stale_plugin import ADAPTER, SHM, write

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

EVERY = ["max_steps=8", "entropy_bonus=0.1", "sync.probe_every=0"]
Q = "model.layers.2.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts"
SYNC = {
    "experts": (
        SHM,
        f"{EXPERTS}.down_proj",
        ["model=tiny-moe", "model.warm_start=null"],
        "weight push: vLLM computes with other weights in",
        "w2_weight",
    ),
    "shm": (
        SHM,
        f"{Q}.weight",
        [],
        "weight push: vLLM computes with other weights in",
        "self_attn.qkv_proj",
    ),
    "adapter": (
        ADAPTER,
        f"{Q}.lora_B",
        ["adapter=lora", "optim.learning_rate=1e-2"],
        "adapter push: vLLM holds other matrices in",
        "self_attn.q_proj",
    ),
}


@pytest.mark.parametrize(("case", "step"), [("shm", 5), ("adapter", 1), ("experts", 2)])
def test_a_layer_that_vllm_does_not_load_ends_the_run_in_that_step(
    case, step, tmp_path_factory, launcher
):
    code, tensor, overrides, sentence, layer = SYNC[case]
    sync = "adapter" if case == "adapter" else "shm"
    environment = write(tmp_path_factory.mktemp("plugin"), code, tensor, step)
    there = Launcher(launcher.output, {**launcher.environment, **environment})
    name = f"stale-{case}-{step}"
    result = there.run(name, *EVERY, f"sync={sync}", *overrides)
    assert result.status == 1, result.screen
    assert sentence in result.screen
    assert layer in result.screen
    # The trainer's weights are right and saved. vLLM sampled nothing with the wrong layer.
    assert [line["step"] for line in result.metrics] == list(range(step))
    assert RunFolder(result.folder).num_saved_steps() == step
