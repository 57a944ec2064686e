"""A whole run that trains LoRA and pushes only the adapter."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

# The entropy bonus moves the policy at every step, even if all rewards are equal.
ADAPTER = [
    "adapter=lora", "sync=adapter", "model.dtype=float32", "optim.learning_rate=5e-3",
    "trainer.checkpoint_every=2", "entropy_bonus=0.01", "batch_size=16", "group_size=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(launcher):
    return launcher.succeed("adapter", "max_steps=4", *ADAPTER)


def test_vllm_agrees_after_every_push_of_an_adapter(run):
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]
    assert all(0 < line["mismatch/mean_abs"] < 1e-4 for line in run.metrics)
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 1e-4
    assert all(line["train/grad_norm"] > 0 for line in run.metrics)


def test_every_token_has_the_version_of_the_adapter_that_sampled_it(run):
    assert [line["staleness/max"] for line in run.metrics] == [0, 1, 1, 1]
    lines = (run.folder / "rollouts" / "step_000003.jsonl").read_text().splitlines()
    assert {version for line in lines for version in json.loads(line)["versions"]} <= {2, 3}


def test_the_exported_adapter_loads_on_the_model_it_names(run):
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


def test_a_resumed_run_goes_on_with_the_same_adapter(run, launcher):
    result = launcher.succeed("adapter", "max_steps=5", *ADAPTER, "resume=true")
    assert [line["step"] for line in result.metrics] == [0, 1, 2, 3, 4]
    assert result.metrics[4]["mismatch/sampled_mean_abs"] < 1e-4
    assert result.metrics[4]["mismatch/mean_abs"] < 1e-4
