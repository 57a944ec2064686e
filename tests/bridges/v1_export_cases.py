"""This project's environments evaluated by the command behind `vf-eval`, over HTTP."""

import json

import pytest
from verifiers.v1.cli.eval.main import main

from tests.support.bridges.serving import (
    ScriptedEndpoint,
    reverse_half,
    sort_the_first,
    use_the_adder,
)


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Return a function that evaluates an environment and returns its episodes."""
    monkeypatch.setattr("sys.argv", ["vf-eval"])

    def run(endpoint, env, options, repeats=1):
        config = {
            "env": {"taskset": {"id": "offbyone", "env": env, "knobs": options}},
            "client": {"base_url": endpoint.url, "api_key_var": "NO_KEY"},
            "model": "scripted",
            "num_rollouts": repeats,
            "push": False,
            "rich": None,
            "output_dir": str(tmp_path),
            "run": {"name": "run"},
        }
        (tmp_path / "eval.json").write_text(json.dumps(config))
        main(["@", str(tmp_path / "eval.json")])
        lines = (tmp_path / "run" / "traces.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_reverse_text_is_evaluated_by_the_library(evaluate):
    with ScriptedEndpoint(reverse_half).listening() as endpoint:
        options = {"num_eval": 20, "system_prompt": "Backwards, please."}
        episodes = evaluate(endpoint, "reverse-text", options, repeats=2)
    assert endpoint.bodies[0]["messages"][0]["content"] == "Backwards, please."
    assert len(episodes) == len(endpoint.bodies) == 40
    assert all(episode["ok"] for episode in episodes)
    rewards = []
    for episode in episodes:
        (trace,) = episode["traces"]
        word = trace["task"]["data"]["prompt"][-1]["content"].removeprefix("reverse: ")
        right = word > "n" or word == word[::-1]
        assert trace["rewards"]["exact"] == {"score": float(right), "weight": 1.0}
        assert trace["rewards"]["similarity"]["weight"] == 0.0
        rewards.append(right)
    assert 0 < sum(rewards) < 40


def test_rewards_per_turn_are_summed_and_a_system_prompt_is_sent(evaluate):
    options = {"num_eval": 1, "min_turns": 2, "max_turns": 2, "system_prompt": "Be brief."}
    with ScriptedEndpoint(sort_the_first).listening() as endpoint:
        (episode,) = evaluate(endpoint, "alphabet-sort", options)
    assert endpoint.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    (trace,) = episode["traces"]
    assert trace["rewards"]["exact"]["score"] == 0.5


def test_tools_are_described_called_and_counted(evaluate):
    with ScriptedEndpoint(use_the_adder).listening() as endpoint:
        (episode,) = evaluate(endpoint, "adding.Adding", {"reward": None})
    assert endpoint.bodies[0]["tools"][0]["function"]["name"] == "add"
    (trace,) = episode["traces"]
    assert trace["rewards"]["right"] == {"score": 1.0, "weight": 2.0}
    assert trace["metrics"] == {"turns": 2.5}
    assert sum(node["sampled"] for node in trace["nodes"]) == 2


@pytest.mark.parametrize(
    ("reward", "why"),
    [("raise", "no score"), ("raise in reply", "no reply"), ("nan", "NaN or infinity")],
)
def test_a_rollout_that_cannot_be_scored_ends_in_an_error(evaluate, reward, why):
    with ScriptedEndpoint(use_the_adder).listening() as endpoint:
        (episode,) = evaluate(endpoint, "adding.Adding", {"reward": reward})
    assert not episode["ok"]
    assert why in json.dumps(episode)
