"""A run ends in the step in which vLLM does not load one expert or matrix of a push."""

import pytest

from rl.runtime.folder import RunFolder
from tests.support.launching import COLD, Launcher
from tests.support.stale_plugin import ADAPTER, SHM, write

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

EVERY = ["max_steps=8", "entropy_bonus=0.1", "sync.probe_every=0"]
EVERY += ["batch_size=8", "group_size=4", "sampler.max_tokens=16"]
EXPERTS, Q = "layers.1.mlp.experts", "layers.2.self_attn.q_proj"
OF_LORA = ["adapter=lora", "optim.learning_rate=1e-2"]


@pytest.mark.parametrize(
    ("sync", "code", "tensor", "step", "overrides", "what", "layer"),
    [
        ("shm", SHM, f"model.{EXPERTS}.down_proj", 2, ["model=tiny-moe", *COLD],
         "weight push: vLLM does not use the pushed weights in",
         f"{EXPERTS}.routed_experts.w2_weight"),
        ("adapter", ADAPTER, f"model.{Q}.lora_B", 1, OF_LORA,
         "adapter push: vLLM does not use the pushed matrices in", Q),
    ],
    ids=["shm", "adapter"],
)  # fmt: skip
def test_a_layer_that_vllm_does_not_load_ends_the_run_in_that_step(
    sync, code, tensor, step, overrides, what, layer, tmp_path_factory, launcher
):
    environment = write(tmp_path_factory.mktemp("plugin"), code, tensor, step)
    there = Launcher(launcher.output, {**launcher.environment, **environment})
    result = there.run(f"stale-{sync}-{step}", *EVERY, f"sync={sync}", *overrides)
    assert result.status == 1, result.screen
    assert what in result.screen
    assert layer in result.screen
    # The trainer's weights are right and saved. vLLM sampled nothing with the wrong layer.
    assert [line["step"] for line in result.metrics] == list(range(step))
    assert RunFolder(result.folder).num_saved_steps() == step
