"""wiki-search on the real stack: tool calls through vLLM, and several turns in one training row."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def test_the_policy_that_ships_calls_tools_and_trains_on_its_own_tokens_only(launcher):
    # 16 questions at a low temperature, so that almost surely some answer is right.
    sure = ["batch_size=64", "sampler.temperature=0.3", "model.dtype=float32"]
    few = ["evaluation.num_examples=8", "evaluation.rollouts_per_example=1"]
    run = launcher.succeed("wiki", "env=wiki-search", "max_steps=2", *sure, *few, warm=[])
    assert [line["step"] for line in run.metrics if "eval/reward" in line] == [0, 2]
    played = []
    for step, line in enumerate(run.metrics[:2]):  # the third is the last evaluation
        text = (run.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text()
        rollouts = [json.loads(each) for each in text.splitlines()]
        played += rollouts
        assert line["train/tokens"] == sum(each["tokens"] for each in rollouts if each["used"])
        assert line["rollout/turns"] > 2
        assert line["rollout/forks"] == 0  # an episode of several turns is one row
        # The logprobs agree only if every sampled token is at its place after the tools' answers.
        assert line["mismatch/mean_abs"] < 1e-4
    assert len(run.metrics) == 3
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 1e-4
    assert 0 < sum(rollout["reward"] for rollout in played) / len(played) < 1
    right = [rollout for rollout in played if rollout["reward"] == 1.0]
    assert max(rollout["turns"] for rollout in right) >= 2
    tools = [m for m in right[0]["messages"] if m["role"] == "tool"]
    assert all(not m["content"].startswith("Error") for m in tools)
