"""Whole evaluations over HTTP: the policy is a scripted endpoint."""

import json
from pathlib import Path

import pytest
import yaml

from envs.episode import Example
from envs.protocol import Environment
from envs.reverse_text import ReverseText
from lab.evaluation.standalone import evaluate
from rl.config.build import build
from rl.config.schema import ConfigError
from tests.lab.evaluation.test_standalone import page_of
from tests.support.composing import composed
from tests.support.prompted_endpoint import PromptedEndpoint

OURS = ("reflection.", "num_train", "num_val", "max_calls")  # options of a prompt search


def evaluated(folder: Path, *more: str) -> tuple[float, PromptedEndpoint, Environment]:
    """Evaluate a policy that reverses words of at most four letters."""
    with PromptedEndpoint().listening() as endpoint:
        prompt = {"env.system_prompt": "'Write short words backwards.'"}
        overrides = [o for o in endpoint.overrides(**prompt) if not o.startswith(OURS)]
        overrides += [f"output_dir={folder}", "run_name=mine", "num_examples=20", *more]
        overrides += ["rollouts_per_example=2", "env.num_eval=20"]
        config = composed(*overrides, primary="evaluate")
        env = build(config["env"])()
        return evaluate(config, overrides=overrides), endpoint, env


def check_requests(endpoint: PromptedEndpoint, examples: list[Example], *, seeded: bool) -> None:
    asked = {word for _, word in endpoint.policy_asked}
    assert asked == {example.info["answer"][::-1] for example in examples}
    assert {"seed" in body for body in endpoint.bodies if body} == {seeded}


class LongOnly(ReverseText):
    async def score(self, episode):
        if len(episode.example.info["answer"]) <= 3:
            raise ValueError("too short")
        return await super().score(episode)


def test_the_running_mean_leaves_out_rollouts_without_a_reward(tmp_path, capsys):
    options = ["split=train", "pass_threshold=1.5", "env.num_train=20", "sampler.seeded=true"]
    reward, endpoint, env = evaluated(tmp_path, f"env._target_={__name__}.LongOnly", *options)
    check_requests(endpoint, env.examples("train"), seeded=True)
    words = [word for _, word in endpoint.policy_asked if len(word) > 3]
    assert 0 < len(words) < 40
    assert reward == pytest.approx(sum(len(word) <= 4 for word in words) / len(words))
    screen = " ".join(capsys.readouterr().out.split())
    assert f"40 of 40 rollouts, mean reward {reward:.3f}" in screen
    assert "a rollout passes if its reward is >= 1.5; " in screen
    assert "pass@1 0.0% " in screen


def test_an_evaluation_plays_counts_and_writes_every_rollout(tmp_path, capsys):
    reward, endpoint, env = evaluated(tmp_path)
    check_requests(endpoint, env.examples("eval"), seeded=False)
    screen = capsys.readouterr().out
    words = [word for _, word in endpoint.policy_asked]
    assert len(words) == 40
    expected = sum(len(word) <= 4 for word in words) / 40
    assert reward == pytest.approx(expected)
    # One line for each tenth of the rollouts
    progress = [line for line in screen.splitlines() if " of 40 rollouts, mean reward " in line]
    assert len(progress) == 10
    assert progress[-1] == f"40 of 40 rollouts, mean reward {expected:.3f}"
    assert progress[4].startswith("20 of 40 rollouts, mean reward ")
    folder = tmp_path / "mine"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_examples"], summary["num_rollouts"]) == (20, 40)
    assert summary["reward"] == pytest.approx(expected)
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    assert sum(line["reward"] for line in lines) / 40 == pytest.approx(expected)
    note = page_of(folder)["note"]
    assert f" · policy at {endpoint.url} · python evaluate.py client=messages " in note
    assert "num_examples=20" in yaml.safe_load((folder / "overrides.yaml").read_text())["overrides"]
    with pytest.raises(ConfigError, match="mine"):  # an evaluation is not overwritten
        evaluated(tmp_path)
