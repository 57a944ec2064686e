"""A mixture of experts trains on the real vLLM, which proves that it has every pushed parameter."""

import re

import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

FEW = ["max_steps=3", "batch_size=16", "group_size=4", "entropy_bonus=0.01", "sync.probe_every=1"]
# On a CPU vLLM cannot run an adapter beside experts, so sync=auto merges it and pushes all weights.
PUSHES = {"none": ["adapter=none", "sync=shm"], "lora": ["adapter=lora", "sync=auto"]}


@pytest.mark.parametrize("adapter", PUSHES)
def test_vllm_has_every_parameter_of_the_experts_and_agrees(adapter, launcher):
    run = launcher.succeed(f"moe-{adapter}", "model=tiny-moe", *PUSHES[adapter], *FEW)
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert all(line["train/grad_norm"] > 0 for line in run.metrics)
    # Trainer and vLLM may choose different experts for a token (docs/scaling.md).
    assert all(0 < line["mismatch/mean_abs"] < 0.03 for line in run.metrics)
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 0.03
    log = (run.folder / "logs" / "inference.log").read_text()
    (coverage,) = re.findall(r"(\d+) of (\d+) parameters are compared with what was sent(.*)", log)
    assert coverage == ("39", "39", "")
