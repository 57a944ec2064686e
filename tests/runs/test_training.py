"""Whole runs on the real vLLM: metrics follow the settings; seeds, stop texts, given tokens."""

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
from tests.support.beginning_strategy import TEXT
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


def test_a_run_trains_one_step_off_policy_agrees_with_vllm_and_is_on_disk(first, launcher):
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
    # Every rollout, and a model that Transformers loads.
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


# Two steps, because the first step changes the weights that sample the second.
# An untrained policy does not end its turns, so limit them.
SHORT = ["model.dtype=float32", "max_steps=2", "batch_size=16", "group_size=4"]
SHORT += ["sampler=sync", "sampler.max_tokens=24", "env=alphabet-sort"]
SHORT += ["env.reward_weights={exact: 0.0, similarity: 1.0}"]
VOWELS = "aeio"
STOP = "sampler.stop=[a,e,i,o]"


def said(result) -> list:
    """Return group, messages, reward and tokens of every rollout of a run."""
    files = sorted((result.folder / "rollouts").glob("step_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["group"], line["messages"], line["reward"], line["tokens"]) for line in lines]


@pytest.fixture(scope="module")
def seeded(launcher) -> list:
    """Return two equal runs, whose turns also end at a stop text."""
    overrides = [*SHORT, STOP, "sampler.seeded=true"]
    return [launcher.succeed(f"seeded-{i}", *overrides, warm=COLD) for i in (1, 2)]


@pytest.mark.slow
def test_a_seeded_synchronous_run_of_several_turns_repeats_itself(seeded):
    first, second = seeded
    assert said(first) == said(second)
    for one, other in zip(first.metrics, second.metrics, strict=True):
        compared = [key for key in one if key.startswith(("train/", "rollout/", "mismatch/"))]
        same = [key for key in compared if not key.endswith(("time", "per_s"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


@pytest.mark.slow
@pytest.mark.parametrize("client", ["renderer", "tokens"])
def test_a_stop_text_ends_turns_and_its_tokens_are_trained_on(client, seeded, launcher):
    result = seeded[0]  # with client=renderer
    if client == "tokens":
        result = launcher.succeed("stop-tokens", *SHORT, STOP, "client=tokens", warm=COLD)
    for _, messages, _, _ in said(result):
        turns = [m["content"] for m in messages if m["role"] == "assistant"]
        assert not any(letter in turn for turn in turns for letter in VOWELS)
    # vLLM agrees with the trainer on every token, the stop text's tokens included.
    assert all(line["mismatch/sampled_mean_abs"] < 1e-4 for line in result.metrics)
    # The server's template forks if the policy samples bytes that are not text.
    assert client == "tokens" or all(line["rollout/forks"] == 0 for line in result.metrics)


LIMITED = ["sampler.top_p=0.9", "sampler.top_k=24", "sampler.temperature=0.8"]


@pytest.mark.slow
def test_logprobs_among_the_kept_tokens_are_those_of_vllm(launcher):
    given = [*SHORT, *LIMITED, "client=tokens", "record=all", "kl=k3", "updates_per_batch=2"]
    given += ["evaluation=default", "evaluation.num_examples=2", "evaluation.temperature=0.5"]
    given += ["entropy_bonus=0.1"]  # a gradient even if all rewards are equal
    result = launcher.succeed("limited", *given, warm=COLD)
    for step, line in enumerate(result.metrics[:2]):  # the third is the last evaluation
        assert (line["staleness/max"], line["mismatch/sampled_max_abs"] < 1e-3) == (0, True)
        for row in (row for row in read_rows(RunFolder(result.folder), step) if row.trained):
            columns, mask = row.columns, row.columns["mask"]
            np.testing.assert_allclose(columns["old"][mask], columns["mu"][mask], atol=1e-3)
            # The policy is the reference until its first update.
            for name, is_equal in (("ref", step == 0), ("pi", row.update == 0)):
                differences = np.abs(columns[name] - columns["old"])[mask]
                assert differences.max() < 1e-5 if is_equal else differences.max() > 1e-4


@pytest.mark.slow
def test_given_tokens_have_the_logprobs_and_versions_of_the_policy_token_by_token(launcher):
    own = "strategy._target_=tests.support.beginning_strategy.Beginning"
    result = launcher.succeed("beginning", *SHORT, "record=all", own, warm=COLD)
    kept_some = 0
    for step, line in enumerate(result.metrics):
        assert (line["staleness/mean"], line["staleness/max"]) == (0, 0)
        firsts = {}  # group -> columns of the first row of each attempt
        for row in read_rows(RunFolder(result.folder), step):
            columns, mask = row.columns, row.columns["mask"]
            # The weights change at every step, so only those of this version give these logprobs.
            assert set(columns["version"][mask]) == {step}
            np.testing.assert_allclose(columns["mu"][mask], columns["pi"][mask], atol=1e-3)
            group, attempt = row.id.split(".")
            firsts.setdefault(group, {}).setdefault(int(attempt), columns)
        for attempts in firsts.values():
            assert attempts.keys() == {0, 1, 2, 3}
            root, branch, masked, trained = (attempts[number] for number in range(4))
            first = int(root["mask"].argmax())
            if root["mask"].sum() > 1:  # then the branch keeps a token or more
                kept_some += 1
                for name in ("token_ids", "mask", "mu", "version", "turns"):
                    same = (columns[name][: first + 1] for columns in (root, branch))
                    np.testing.assert_array_equal(*same)
            given = slice(first, first + len(TEXT))
            np.testing.assert_array_equal(masked["token_ids"][given], trained["token_ids"][given])
            assert not masked["mask"][given].any()
            assert trained["mask"][given].all()
            assert masked["turns"][given].tolist() == trained["turns"][given].tolist() == [0, 0]
            assert masked["version"][given].tolist() == [-1, -1]
            assert masked["mask"][given.stop]
    assert kept_some
    for line in map(json.loads, (result.folder / "rollouts" / "step_000000.jsonl").open()):
        if int(line["id"].split(".")[1]) >= 2:
            turns = [m["content"] for m in line["messages"] if m["role"] == "assistant"]
            assert turns[0][:2] == TEXT
