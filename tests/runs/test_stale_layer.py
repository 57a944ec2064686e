"""A run ends in the step in which vLLM does not load one expert or matrix of a push."""

import pytest

from rl.runtime.folder import RunFolder
from tests.support.launching import COLD, Launcher
from tests.support.stale_plugin import ADAPTER, SHM, write

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

EVERY = ["max_steps=8", "entropy_bonus=0.1", "sync.probe_every=0"]
EVERY += ["batch_size=8", "group_size=4", "sampler.max_tokens=16"]
Q = "model.layers.2.self_attn.q_proj"
SYNC = {
    "shm": (
        SHM,
        "model.layers.1.mlp.experts.down_proj",
        ["model=tiny-moe", *COLD],
        "weight push: vLLM does not use the pushed weights in",
        "layers.1.mlp.experts.routed_experts.w2_weight",
    ),
    "adapter": (
        ADAPTER,
        f"{Q}.lora_B",
        ["adapter=lora", "optim.learning_rate=1e-2"],
        "adapter push: vLLM does not use the pushed matrices in",
        "layers.2.self_attn.q_proj",
    ),
}


@pytest.mark.parametrize(("sync", "step"), [("shm", 2), ("adapter", 1)])
def test_a_layer_that_vllm_does_not_load_ends_the_run_in_that_step(
    sync, step, tmp_path_factory, launcher
):
    code, tensor, overrides, sentence, layer = SYNC[sync]
    environment = write(tmp_path_factory.mktemp("plugin"), code, tensor, step)
    there = Launcher(launcher.output, {**launcher.environment, **environment})
    name = f"stale-{sync}-{step}"
    result = there.run(name, *EVERY, f"sync={sync}", *overrides)
    assert result.status == 1, result.screen
    assert sentence in result.screen
    assert layer in result.screen
    # The trainer's weights are right and saved. vLLM sampled nothing with the wrong layer.
    assert [line["step"] for line in result.metrics] == list(range(step))
    assert RunFolder(result.folder).num_saved_steps() == step
