"""This project's environments evaluated by the verifiers library, classic API, over HTTP."""

import asyncio

import pytest
import verifiers as vf
from verifiers.types import ClientConfig

from tests.support.bridges.serving import (
    ScriptedEndpoint,
    reverse_half,
    sort_the_first,
    use_the_adder,
)


def evaluate(endpoint, count, repeats=1, **options):
    """Return the result of the library's own `evaluate`."""
    env = vf.load_environment("offbyone", **options)
    client = ClientConfig(api_base_url=endpoint.url, api_key_var="NO_KEY", max_retries=0)
    done = env.evaluate(client, "scripted", num_examples=count, rollouts_per_example=repeats)
    return asyncio.run(done)


def test_reverse_text_is_evaluated_by_the_library(monkeypatch):
    monkeypatch.setenv("NO_KEY", "none")
    with ScriptedEndpoint(reverse_half).listening() as endpoint:
        options = {"num_eval": 30, "max_length": 4, "system_prompt": "Backwards, please."}
        results = evaluate(endpoint, 20, 2, env="reverse-text", **options)
    assert endpoint.bodies[0]["messages"][0]["content"] == "Backwards, please."
    outputs = results["outputs"]
    assert len(outputs) == len(endpoint.bodies) == 40
    assert {o["reward"] for o in outputs} == {0.0, 1.0}
    for output in outputs:
        word = output["prompt"][-1]["content"].removeprefix("reverse: ")
        assert 3 <= len(word) <= 4
        assert output["reward"] == output["metrics"]["exact"] == (word > "n" or word == word[::-1])
    assert results["metadata"]["avg_reward"] == sum(o["reward"] for o in outputs) / 40


def test_rewards_per_turn_are_summed_and_a_system_prompt_is_sent(monkeypatch):
    monkeypatch.setenv("NO_KEY", "none")
    options = {"env": "alphabet-sort", "min_turns": 2, "max_turns": 2, "system_prompt": "Be brief."}
    with ScriptedEndpoint(sort_the_first).listening() as endpoint:
        (output,) = evaluate(endpoint, 1, **options)["outputs"]
    assert endpoint.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert output["metrics"]["exact"] == 0.5
    assert output["error"] is None


def test_tools_are_described_called_and_counted(monkeypatch):
    monkeypatch.setenv("NO_KEY", "none")
    with ScriptedEndpoint(use_the_adder).listening() as endpoint:
        (output,) = evaluate(endpoint, 1, env="adding.Adding", reward=None)["outputs"]
    assert endpoint.bodies[0]["tools"][0]["function"]["name"] == "add"
    assert [m["role"] for m in output["completion"]] == ["assistant", "tool", "assistant"]
    assert output["reward"] == 2.0
    assert output["metrics"] == {"right": 1.0, "turns": 2.5, "num_turns": 2.0}
    assert output["error"] is None


@pytest.mark.parametrize(
    ("reward", "why"),
    [("raise", "no score"), ("raise in reply", "no reply"), ("nan", "NaN or infinity")],
)
def test_a_rollout_that_cannot_be_scored_ends_in_an_error(monkeypatch, reward, why):
    monkeypatch.setenv("NO_KEY", "none")
    with ScriptedEndpoint(use_the_adder).listening() as endpoint:
        (output,) = evaluate(endpoint, 1, env="adding.Adding", reward=reward)["outputs"]
    assert output["reward"] == 0.0
    assert why in str(output["error"])


def test_an_episode_is_closed_after_it_was_scored(monkeypatch):
    monkeypatch.setenv("NO_KEY", "none")
    env = vf.load_environment("offbyone", env="adding.Adding", reward=None)
    closed = []
    env._exported.close = lambda episode: closed.append(episode.stop_reason)
    with ScriptedEndpoint(use_the_adder).listening() as endpoint:
        client = ClientConfig(api_base_url=endpoint.url, api_key_var="NO_KEY", max_retries=0)
        asyncio.run(env.evaluate(client, "scripted", num_examples=1))
    assert closed == ["stop"]
