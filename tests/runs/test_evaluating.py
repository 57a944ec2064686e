"""Evaluation on the real stack: during training, of a checkpoint, and of an external server."""

import json
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.launching import COLD, ROOT, SCRIPTED, Result, begin, ended
from tests.support.serving import serving

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

LETTERS = "env.reward_weights={exact: 0.0, similarity: 1.0}"
FEW = ["num_examples=6", "rollouts_per_example=4", "model.max_seq_len=1024", LETTERS]


@pytest.fixture(scope="module")
def trained(launcher):
    few = ["batch_size=16", "group_size=4", "evaluation=default", "evaluation.every=2"]
    few += ["evaluation.num_examples=8", LETTERS]
    return launcher.succeed("evaluated", "max_steps=3", *few, warm=COLD)


def evaluate(output: Path, name: str, *overrides: str) -> Result:
    command = [sys.executable, "evaluate.py", f"output_dir={output}", f"run_name={name}"]
    return ended(begin([*command, *overrides], ROOT, {}), output / name)


def test_a_run_evaluates_its_first_its_last_and_every_other_version_and_keeps_rollouts(trained):
    lines = {line["step"]: line for line in trained.metrics}
    assert list(lines) == [0, 1, 2, 3]
    assert [step for step, line in lines.items() if "eval/reward" in line] == [0, 2, 3]
    assert "train/reward" not in lines[3]  # only the evaluation of the last version
    assert 0 <= lines[0]["eval/reward"] <= 1
    for version in (0, 2, 3):
        path = trained.folder / "evaluations" / f"version_{version:06d}.jsonl"
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rollouts) == 8 * 4
        assert len({rollout["example"] for rollout in rollouts}) == 8


def test_a_checkpoint_is_evaluated_by_a_new_server(trained, tmp_path):
    model = trained.folder / "checkpoints" / "step_000003" / "hf"
    mine = [f"model.path={model}", "client=tokens", SCRIPTED[0]]
    done = evaluate(tmp_path, "mine", *mine, *FEW)
    assert done.status == 0, done.screen
    summary = json.loads((done.folder / "summary.json").read_text())
    assert (summary["num_rollouts"], summary["num_scored"]) == (24, 24)
    assert 0 <= summary["reward"] < 1
    assert "pass@4" in done.screen
    assert len((done.folder / "rollouts.jsonl").read_text().splitlines()) == 24
    assert not (done.folder / "sockets").exists()


@pytest.mark.slow
def test_the_adapter_of_a_lora_run_is_evaluated_with_its_base(launcher, tmp_path):
    taught = ["loss=sft", "sampler=demonstrations", "group_size=1", "max_steps=40", "batch_size=64"]
    lora = ["adapter=lora", "optim.learning_rate=1e-2"]
    result = launcher.succeed("lora", *taught, *lora, LETTERS)
    adapter = result.folder / "checkpoints" / "step_000040" / "hf"
    assert not (adapter / "model.safetensors").exists()
    done = evaluate(tmp_path, "lora", f"model.path={adapter}", *FEW)
    assert done.status == 0, done.screen
    # The base without the adapter scores 0.02.
    assert json.loads((done.folder / "summary.json").read_text())["reward"] > 0.1


@pytest.mark.slow
def test_an_external_server_is_evaluated_by_chat_messages(trained, tmp_path, monkeypatch):
    model = trained.folder / "checkpoints" / "step_000003" / "hf"
    with serving(model, tmp_path / "them.log", **{"api-key": "secret"}) as url:
        remote = ["client=messages", f"client.url={url}", "client.api_key_variable=THEIR_KEY"]
        few = ["num_examples=6", "rollouts_per_example=4", "sampler.max_tokens=32", LETTERS]
        monkeypatch.setenv("THEIR_KEY", "secret")
        done = evaluate(tmp_path, "good", *remote, "client.model=them", *few)
        assert done.status == 0, done.screen
        summary = json.loads((done.folder / "summary.json").read_text())
        assert 0 <= summary["reward"] < 1
        assert summary["mean_length"] > 1
        assert "secret" not in (done.folder / "config.yaml").read_text() + done.screen
        wrong = evaluate(tmp_path, "model", *remote, "client.model=nobody", *few)
        assert (wrong.status, "Traceback" in wrong.screen) == (1, False)
        assert "the server knows no model client.model=nobody" in wrong.screen

        # tests/envs/test_http_client.py checks the message for this status.
        headers = {"Authorization": "Bearer wrong"}
        answer = httpx.post(f"{url}/chat/completions", json={}, headers=headers)
        assert answer.status_code == httpx.codes.UNAUTHORIZED
