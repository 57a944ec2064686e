"""What vLLM makes of the sampler: seeds that repeat a run, and texts that end a turn."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

# Two steps: the second is sampled from weights that the first has changed.
SEEDED = ["sampler=sync", "sampler.seeded=true", "model.dtype=float32", "max_steps=2"]
SEEDED += ["batch_size=16"]
SHORT = ["sampler.max_tokens=24"]  # a policy of eight steps does not know where to end


def said(result) -> list:
    """Every rollout of a run: its words, and what it was worth."""
    assert result.status == 0, result.screen
    files = sorted((result.folder / "rollouts").glob("step_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["group"], line["messages"], line["reward"], line["tokens"]) for line in lines]


@pytest.mark.parametrize("env", ["reverse-text", "alphabet-sort"])  # one request a group, and turns
def test_a_seeded_synchronous_run_repeats_itself(env, launcher):
    overrides = [*SEEDED, *SHORT, f"env={env}", "env.reward_weights={exact: 0.0, similarity: 1.0}"]
    first, second = (launcher.run(f"{env}-{i}", *overrides) for i in (1, 2))
    assert said(first) == said(second)
    for one, other in zip(first.metrics, second.metrics, strict=True):
        of_what = [key for key in one if key.startswith(("train/", "rollout/", "mismatch/"))]
        same = [key for key in of_what if not key.endswith(("time", "per_s"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


@pytest.mark.parametrize("client", ["renderer", "tokens"])
def test_a_text_ends_turns_whoever_renders_and_its_tokens_are_trained_on(client, launcher):
    result = launcher.run(
        f"stop-{client}",
        *("max_steps=2", "env=alphabet-sort", f"client={client}", "sampler.stop=[a]", *SHORT),
        "env.reward_weights={exact: 0.0, similarity: 1.0}",
    )
    for _, messages, _, _ in said(result):
        assert all("a" not in m["content"] for m in messages if m["role"] == "assistant")
    # vLLM agrees with the trainer on every token, that of the stop text too.
    assert all(line["mismatch/sampled_mean_abs"] < 0.02 for line in result.metrics[:1])
    # The server's template forks where a policy of eight steps samples bytes that are no text.
    assert client == "tokens" or all(line["rollout/forks"] == 0 for line in result.metrics)
