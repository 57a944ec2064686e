"""Our environments evaluated by verifiers itself, by its own command, over HTTP."""

import json
import subprocess
import sys

import pytest
from serving import ScriptedEndpoint, reverse_half, use_the_adder

MAIN = "from verifiers.v1.cli.eval.main import main; main()"


def evaluate(endpoint, folder, *options):
    """The episodes that `vf-eval offbyone` leaves in its results."""
    flags = ["--client.base-url", endpoint.url, "--model", "scripted", "--no-push", "--no-rich"]
    where = ["--output-dir", str(folder), "--run.name", "run"]
    command = [sys.executable, "-c", MAIN, "offbyone", *flags, *where, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(x) for x in (folder / "run" / "traces.jsonl").read_text().splitlines()]


def test_reverse_text_is_evaluated_by_the_library(tmp_path):
    knobs = ["--env.taskset.env", "reverse-text", "--env.taskset.knobs", '{"num_eval": 20}']
    with ScriptedEndpoint(reverse_half).serving() as endpoint:
        episodes = evaluate(endpoint, tmp_path, *knobs, "-r", "2")
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


def test_tools_are_described_called_and_counted(tmp_path):
    knobs = ["--env.taskset.env", "adding.Adding", "--env.taskset.knobs", '{"reward": null}']
    with ScriptedEndpoint(use_the_adder).serving() as endpoint:
        (episode,) = evaluate(endpoint, tmp_path, *knobs)
    assert endpoint.bodies[0]["tools"][0]["function"]["name"] == "add"
    (trace,) = episode["traces"]
    assert trace["rewards"]["right"] == {"score": 1.0, "weight": 2.0}
    assert trace["metrics"] == {"turns": 2.5}
    assert sum(node["sampled"] for node in trace["nodes"]) == 2


@pytest.mark.parametrize(
    ("reward", "why"),
    [("raise", "no score"), ("raise in reply", "no reply"), ("nan", "NaN or infinity")],
)
def test_what_cannot_be_judged_is_an_error_of_that_rollout(tmp_path, reward, why):
    knobs = ["--env.taskset.env", "adding.Adding"]
    knobs += ["--env.taskset.knobs", json.dumps({"reward": reward})]
    with ScriptedEndpoint(use_the_adder).serving() as endpoint:
        (episode,) = evaluate(endpoint, tmp_path, *knobs)
    assert not episode["ok"]
    assert why in json.dumps(episode)
