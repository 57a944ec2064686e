"""wiki-search for real: tool calls through vLLM, several turns that stay one training row."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(launcher):
    # 16 questions, and few errors: some answer is right, all but surely.
    sure = ["batch_size=64", "sampler.temperature=0.3", "model.dtype=float32"]
    result = launcher.run("wiki", "env=wiki-search", "max_steps=2", *sure, warm=[])
    assert result.status == 0, result.screen
    return result


def steps(run):
    """The lines of the steps; the last line is the evaluation of the last policy."""
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


def test_held_out_questions_are_evaluated_unasked(run):
    assert [line["step"] for line in run.metrics if "eval/reward" in line] == [0, 2]
    assert len(steps(run)) == 2


def test_an_episode_of_several_turns_is_one_row_that_the_trainer_computes_alike(run):
    for line in steps(run):
        assert line["rollout/turns"] > 2
        assert line["rollout/forks"] == 0
        # Every sampled token, in its place behind the tools' answers: or these would differ.
        assert line["mismatch/mean_abs"] < 1e-4
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 1e-4


def test_only_what_the_policy_said_is_trained(run):
    for step, line in enumerate(steps(run)):
        used = [rollout for rollout in rollouts(run, step) if rollout["used"]]
        assert line["train/tokens"] == sum(rollout["tokens"] for rollout in used)
