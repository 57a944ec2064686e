"""Whole runs on the real stack: the metrics show the settings that the user asked for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from tests.support.equal_runs import SYNC, is_time
from tests.support.equal_runs import Run as ScriptedRun
from tests.support.launching import COLD, ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


# After a short warm start no word is right, but some letters are.
COOLER = "sampler.temperature={_target_: rl.schedule.linear, start: 1.0, end: 0.4, steps: 4}"
LETTERS = "env.reward_weights={exact: 0.0, similarity: 1.0}"
# The entropy bonus gives every step a gradient, even if all rewards are equal.
FIRST = ["trainer.checkpoint_every=2", "seed=3", "entropy_bonus=0.01", LETTERS]
FEW = ["batch_size=16", "group_size=4"]


@pytest.fixture(scope="module")
def first(launcher):
    return launcher.succeed("first", "max_steps=4", *FIRST)


def test_a_run_trains_one_step_off_policy_and_agrees_with_vllm(first, launcher):
    assert [line["step"] for line in first.metrics] == [0, 1, 2, 3]
    assert [line["staleness/max"] for line in first.metrics] == [0, 1, 1, 1]
    assert [line["train/policy_version"] for line in first.metrics] == [1, 2, 3, 4]
    assert all(line["train/grad_norm"] > 0 for line in first.metrics)
    # After every push vLLM agrees with the trainer. The first batch has the trainer's own weights.
    assert all(line["mismatch/mean_abs"] < 0.02 for line in first.metrics)
    assert first.metrics[0]["mismatch/sampled_mean_abs"] < 0.02
    # On a CPU the engine has no worker process, compiles nothing and leaves nothing.
    assert "(Worker pid=" not in (first.folder / "logs" / "inference.log").read_text()
    assert not [*Path(launcher.environment["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")]
    assert not (first.folder / "sockets").exists()


def test_every_rollout_and_a_model_that_transformers_loads_are_on_disk(first):
    lines = (first.folder / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 32
    for group in {rollout["group"] for rollout in rollouts}:
        assert abs(sum(r["advantage"] for r in rollouts if r["group"] == group)) < 1e-5
    # The exported model differs from the first.
    newest, older = (first.folder / "checkpoints" / f"step_00000{n}" / "hf" for n in (4, 2))
    model = AutoModelForCausalLM.from_pretrained(newest)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    weights, before = (load_file(hf / "model.safetensors") for hf in (newest, older))
    assert any(not torch.equal(weights[name], before[name]) for name in weights)


def test_a_resumed_run_goes_on_with_the_next_examples_and_the_same_optimizer(first, launcher):

    def examples(step):
        lines = (first.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        return sorted({json.loads(line)["example"] for line in lines})

    before = [example for step in range(4) for example in examples(step)]
    result = launcher.succeed("first", "max_steps=6", *FIRST, "resume=true")
    assert [line["step"] for line in result.metrics] == [0, 1, 2, 3, 4, 5]
    assert result.metrics[4]["staleness/max"] == 0  # nothing was sampled before the first push
    after = [example for step in (4, 5) for example in examples(step)]
    assert len(set(after)) == len(after)
    assert not set(after) & set(before)


def test_synchronous_training_in_float32_on_two_ranks_is_exactly_on_policy(launcher):
    result = launcher.succeed(
        "sync", "max_steps=3", LETTERS, "sampler=sync", "model.dtype=float32", "trainer.ranks=2",
        "deepspeed=zero2", "loss=grpo", COOLER, "entropy_bonus=0.01", *FEW, warm=COLD,
    )  # fmt: skip
    assert [line["staleness/max"] for line in result.metrics] == [0, 0, 0]
    assert all(line["mismatch/mean_abs"] < 1e-4 for line in result.metrics)
    assert all(line["mismatch/sampled_mean_abs"] < 1e-4 for line in result.metrics)


@pytest.mark.slow
def test_staleness_four_under_zero3_exceeds_four_only_in_replays(launcher, monkeypatch):
    shutil.copy(ROOT / "examples" / "my-lab" / "my_lab" / "likely.py", launcher.output)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the forked engine of vLLM must respect it
    result = launcher.succeed(
        "stale", "max_steps=7", "sampler.max_staleness=4", "deepspeed=zero3", "loss=ppo_clip",
        "env=arithmetic", COOLER, "env._target_=likely.Likely",
        "+env.reward_weights.likely=1.0",
        "buffer=replay", "buffer.max_staleness=6", "record=all",
    )  # fmt: skip
    # vLLM scores the right answer in each episode.
    assert all(0 < line["reward/likely"] < 1 for line in result.metrics)
    assert all(line["mismatch/mean_abs"] < 0.02 for line in result.metrics)
    first, replayed = {}, 0
    for line in result.metrics:
        versions = []
        for row in read_rows(RunFolder(result.folder), line["step"]):
            chosen = row.columns["version"][row.columns["mask"]]
            versions += chosen.tolist()
            origin, _, again = row.id.partition("@")
            assert (line["step"] - chosen).max() <= (6 if again else 4)
            kept = [row.columns[name] for name in ("token_ids", "mask", "version", "mu")]
            if again:
                assert int(again) == line["step"]
                for column, before in zip(kept, first[origin], strict=True):
                    np.testing.assert_array_equal(column, before)
                replayed += len(chosen)
            else:
                first[row.id] = kept
        assert line["staleness/mean"] == pytest.approx(line["step"] - np.mean(versions), abs=1e-4)
    assert replayed > 0


SCHEDULES = [
    "sampler.temperature={_target_:rl.schedule.linear,start:1.0,end:0.5,steps:5}",
    "loss.clip_high={_target_:rl.schedule.pieces,values:{0:5.0,4:2.0}}",
    "reward.length_penalty={_target_:rl.schedule.linear,start:0.0,end:0.05,steps:5}",
]


@pytest.mark.slow
def test_a_killed_run_continues_its_schedules(tmp_path):
    run = ScriptedRun(ROOT, "scheduled", [*SYNC, *SCHEDULES], tmp_path)

    def metrics():
        process = run.start()
        assert process.wait() == 0, process.stdout and process.stdout.read()
        return [{k: v for k, v in line.items() if not is_time(k)} for line in run.metrics]

    whole = metrics()
    temperatures = [line["schedule/sampler.temperature"] for line in whole]
    assert temperatures == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert [line["schedule/loss.clip_high"] for line in whole] == [5.0] * 4 + [2.0] * 2
    shutil.rmtree(run.folder / "checkpoints" / "step_000006")  # as if killed before it was written
    run.overrides.append("resume=true")
    assert json.dumps(metrics()) == json.dumps(whole)


def test_the_policy_that_ships_calls_tools_and_trains_on_its_own_tokens_only(launcher):
    # 16 questions at a low temperature, so that almost surely some answer is right.
    sure = ["batch_size=64", "sampler.temperature=0.3", "model.dtype=float32"]
    few = ["evaluation.num_examples=8", "evaluation.rollouts_per_example=1"]
    run = launcher.succeed("wiki", "env=wiki-search", "max_steps=2", *sure, *few, warm=[])
    assert [line["step"] for line in run.metrics if "eval/reward" in line] == [0, 2]
    played = []
    for step, line in enumerate(run.metrics[:2]):  # the third is the last evaluation
        text = (run.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text()
        rollouts = [json.loads(each) for each in text.splitlines()]
        played += rollouts
        assert line["train/tokens"] == sum(each["tokens"] for each in rollouts if each["used"])
        assert line["rollout/turns"] > 2
        assert line["rollout/forks"] == 0  # an episode of several turns is one row
        # The logprobs agree only if every sampled token is at its place after the tools' answers.
        assert line["mismatch/mean_abs"] < 1e-4
    assert len(run.metrics) == 3
    assert run.metrics[0]["mismatch/sampled_mean_abs"] < 1e-4
    assert 0 < sum(rollout["reward"] for rollout in played) / len(played) < 1
    right = [rollout for rollout in played if rollout["reward"] == 1.0]
    assert max(rollout["turns"] for rollout in right) >= 2
    tools = [m for m in right[0]["messages"] if m["role"] == "tool"]
    assert all(not m["content"].startswith("Error") for m in tools)
