"""wiki-search on the real stack: tool calls through vLLM, and several turns in one training row."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(launcher):
    # 16 questions at a low temperature, so that almost surely some answer is right.
    sure = ["batch_size=64", "sampler.temperature=0.3", "model.dtype=float32"]
    few = ["evaluation.num_examples=8", "evaluation.rollouts_per_example=1"]
    return launcher.succeed("wiki", "env=wiki-search", "max_steps=2", *sure, *few, warm=[])


def steps(run):
    """Return the lines of the steps, without the last line, which is an evaluation."""
    return [line for line in run.metrics if "train/reward" in line]


def rollouts(run, step):
    path = run.folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_policy_that_ships_calls_tools_and_is_sometimes_right(run):
    played = [rollout for step in (0, 1) for rollout in rollouts(run, step)]

    assert 0 < sum(rollout["reward"] for rollout in played) / len(played) < 1
    right = [rollout for rollout in played if rollout["reward"] == 1.0]
    assert max(rollout["turns"] for rollout in right) >= 2
    tools = [m for m in right[0]["messages"] if m["role"] == "tool"]
    assert all(not m["content"].startswith("Error") for m in tools)


def test_held_out_questions_are_evaluated_by_default(run):
    assert [line["step"] for line in run.metrics if "eval/reward" in line] == [0, 2]
    assert len(steps(run)) == 2


def test_an_episode_of_several_turns_is_one_row_with_the_same_logprobs_in_the_trainer(run):
    for line in steps(run):
        assert line["rollout/turns"] > 2
        assert line["rollout/forks"] == 0
        # The logprobs agree only if every sampled token is at its place after the tools' answers.
        assert line["mismatch/mean_abs"] < 1e-4
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 1e-4


def test_only_the_policys_own_tokens_are_trained(run):
    for step, line in enumerate(steps(run)):
        used = [rollout for rollout in rollouts(run, step) if rollout["used"]]
        assert line["train/tokens"] == sum(rollout["tokens"] for rollout in used)
