"""The sampler with the real vLLM: seeds repeat a run, and stop texts end a turn."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

# Two steps, because the first step changes the weights that sample the second.
SEEDED = ["sampler=sync", "sampler.seeded=true", "model.dtype=float32", "max_steps=2"]
SEEDED += ["batch_size=16"]
SHORT = ["sampler.max_tokens=24"]  # after eight supervised steps the policy does not end its turns


def said(result) -> list:
    """Return group, messages, reward and tokens of every rollout of a run."""
    assert result.status == 0, result.screen
    files = sorted((result.folder / "rollouts").glob("step_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["group"], line["messages"], line["reward"], line["tokens"]) for line in lines]


def test_a_seeded_synchronous_run_of_several_turns_repeats_itself(launcher):
    weights = "env.reward_weights={exact: 0.0, similarity: 1.0}"
    overrides = [*SEEDED, *SHORT, "env=alphabet-sort", weights]
    first, second = (launcher.run(f"seeded-{i}", *overrides) for i in (1, 2))
    assert said(first) == said(second)
    for one, other in zip(first.metrics, second.metrics, strict=True):
        compared = [key for key in one if key.startswith(("train/", "rollout/", "mismatch/"))]
        same = [key for key in compared if not key.endswith(("time", "per_s"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


@pytest.mark.parametrize("client", ["renderer", "tokens"])
def test_a_stop_text_ends_turns_with_both_clients_and_its_tokens_are_trained_on(client, launcher):
    result = launcher.run(
        f"stop-{client}",
        *("max_steps=2", "env=alphabet-sort", f"client={client}", "sampler.stop=[a]", *SHORT),
        "env.reward_weights={exact: 0.0, similarity: 1.0}",
    )
    for _, messages, _, _ in said(result):
        assert all("a" not in m["content"] for m in messages if m["role"] == "assistant")
    # vLLM agrees with the trainer on every token, the stop text's tokens included.
    assert all(line["mismatch/sampled_mean_abs"] < 0.02 for line in result.metrics[:1])
    # The server's template forks if the policy samples bytes that are not text.
    assert client == "tokens" or all(line["rollout/forks"] == 0 for line in result.metrics)
