"""Evaluation during training, of a checkpoint and of a server, and a teacher, on the real vLLM."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl.learner.logprobs import Rows
from rl.learner.ranks import Ranks
from rl.learner.reference.endpoint import Endpoint
from rl.learner.reference.local import FrozenModel
from rl.learner.reference.protocol import ReferenceSetting
from rl.runtime.failure import RunFailed
from tests.support import tiny_policy
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


def sharp_teacher(folder: Path) -> Path:
    """Return a teacher with sharp distributions: an untrained model with weights times three."""
    sizes = {"hidden_size": 64, "head_dim": 32}  # the smallest for which vLLM has a CPU kernel
    folder = tiny_policy.model_folder(folder, **sizes)
    model = tiny_policy.exact_model(folder, seed=5).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    model.save_pretrained(folder)
    return folder


def remote(url: str, top_k: int) -> Endpoint:
    more = {"api_key_variable": None, "timeout": 240.0, "max_retries": 0, "sees_hint": False}
    return Endpoint(url=url, model="them", top_k=top_k, **more)


def rows() -> list[Rows]:
    """Return two micro-batches of padded rows with turns; the last row has no completion token."""
    random = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 256, (6, 40), generator=random)
    mask = torch.rand(6, 40, generator=random) < 0.4
    mask[:, :3] = False
    mask[1, 20:] = False
    mask[5] = False
    envs = ("words",) * 6
    return [Rows(token_ids[:4], mask[:4], envs[:4]), Rows(token_ids[4:], mask[4:], envs[4:])]


@pytest.mark.slow
def test_the_servers_likeliest_tokens_are_those_of_the_local_model(tmp_path):
    folder, limit = sharp_teacher(tmp_path / "model"), {"max-model-len": "64"}
    more = {"revision": None, "dtype": "float32", "sees_hint": False}
    policy = SimpleNamespace(ranks=Ranks(0, 1, torch.device("cpu")), has_adapter=False)
    policy.vocabulary = 320
    setting = ReferenceSetting(
        policy=policy, model=folder, dtype=torch.float32, logprob_chunk=7, max_seq_len=63,
        temperature=1.0, seed=0, reads_candidates=True,
    )  # fmt: skip
    with serving(folder, tmp_path / "vllm.log", dtype="float32", **limit) as url:
        for top_k in (1, 5, 20):
            local = FrozenModel(path=str(folder), top_k=top_k, **more)
            both = [one.start(setting).score(rows()) for one in (remote(url, top_k), local)]
            for served, loaded in zip(*both, strict=True):
                for name in ("logprobs", "candidate_logprobs"):
                    given = (getattr(served, name), getattr(loaded, name))
                    torch.testing.assert_close(*given, rtol=1e-3, atol=1e-3)
                # Two tokens of almost equal probability may be in another order.
                assert (served.candidates == loaded.candidates).float().mean() > 0.95
        # Without a comparison, only the given tokens are requested.
        alone = remote(url, 999).start(replace(setting, reads_candidates=False)).score(rows())
        assert alone[0].candidates is None
        for one, other in zip(alone, both[0], strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)
        with pytest.raises(RunFailed, match="returns at most 20 likely tokens"):
            remote(url, 21).start(setting).score(rows())
