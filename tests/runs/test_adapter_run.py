"""Whole runs that push an adapter, and that train a mixture of experts with and without one.

A run ends in the step in which vLLM does not load one expert or matrix of a push.
"""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.runtime.folder import RunFolder
from tests.support.launching import COLD, Launcher
from tests.support.stale_plugin import ADAPTER as STALE_ADAPTER
from tests.support.stale_plugin import SHM, write

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

# The entropy bonus moves the policy at every step, even if all rewards are equal.
FEW = ["batch_size=16", "group_size=4", "entropy_bonus=0.01"]
ADAPTER = ["adapter=lora", "sync=adapter", "model.dtype=float32", "optim.learning_rate=5e-3"]
ADAPTER += ["trainer.checkpoint_every=2", *FEW]
# On a CPU vLLM cannot run an adapter beside experts, so sync=auto merges it and pushes all weights.
PUSHES = {"none": ["adapter=none", "sync=shm"], "lora": ["adapter=lora", "sync=auto"]}


def test_vllm_agrees_after_every_push_of_an_adapter_and_the_run_continues_with_it(launcher):
    run = launcher.succeed("adapter", "max_steps=4", *ADAPTER)
    assert [line["staleness/max"] for line in run.metrics] == [0, 1, 1, 1]
    lines = (run.folder / "rollouts" / "step_000003.jsonl").read_text().splitlines()
    assert {version for line in lines for version in json.loads(line)["versions"]} <= {2, 3}
    newest, older = (run.folder / "checkpoints" / f"step_00000{n}" / "hf" for n in (4, 2))
    config = json.loads((newest / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        plain = base(tokens).logits.clone()
        adapted = PeftModel.from_pretrained(base, newest)(tokens).logits
    assert (plain - adapted).abs().max() > 1e-3
    weights, before = (load_file(hf / "adapter_model.safetensors") for hf in (newest, older))
    assert all(not torch.equal(weights[name], before[name]) for name in weights)

    result = launcher.succeed("adapter", "max_steps=5", *ADAPTER, "resume=true")
    assert [line["step"] for line in result.metrics] == [0, 1, 2, 3, 4]
    assert all(0 < line["mismatch/mean_abs"] < 1e-4 for line in result.metrics)
    assert all(result.metrics[i]["mismatch/sampled_mean_abs"] < 1e-4 for i in (0, 4))
    assert all(line["train/grad_norm"] > 0 for line in result.metrics[:4])


@pytest.mark.parametrize("adapter", PUSHES)
def test_vllm_has_every_parameter_of_the_experts_and_agrees(adapter, launcher):
    given = ["model=tiny-moe", *PUSHES[adapter], "max_steps=3", *FEW, "sync.probe_every=1"]
    run = launcher.succeed(f"moe-{adapter}", *given)
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert all(line["train/grad_norm"] > 0 for line in run.metrics)
    # Trainer and vLLM may choose different experts for a token (docs/scaling.md).
    assert all(0 < line["mismatch/mean_abs"] < 0.03 for line in run.metrics)
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 0.03
    log = (run.folder / "logs" / "inference.log").read_text()
    (coverage,) = re.findall(r"(\d+) of (\d+) parameters are compared with what was sent(.*)", log)
    assert coverage == ("39", "39", "")


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
        ("adapter", STALE_ADAPTER, f"model.{Q}.lora_B", 1, OF_LORA,
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
