"""The sampler with the real vLLM: seeds, stop texts, and turns that begin with given tokens."""

import json

import numpy as np
import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from tests.support.beginning_strategy import TEXT
from tests.support.launching import COLD

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

# Two steps, because the first step changes the weights that sample the second.
# An untrained policy does not end its turns, so limit them.
SHORT = ["model.dtype=float32", "max_steps=2", "batch_size=16", "group_size=4"]
SHORT += ["sampler=sync", "sampler.max_tokens=24", "env=alphabet-sort"]
SHORT += ["env.reward_weights={exact: 0.0, similarity: 1.0}"]
LETTERS = "aeio"
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


def test_a_seeded_synchronous_run_of_several_turns_repeats_itself(seeded):
    first, second = seeded
    assert said(first) == said(second)
    for one, other in zip(first.metrics, second.metrics, strict=True):
        compared = [key for key in one if key.startswith(("train/", "rollout/", "mismatch/"))]
        same = [key for key in compared if not key.endswith(("time", "per_s"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


@pytest.mark.parametrize("client", ["renderer", "tokens"])
def test_a_stop_text_ends_turns_and_its_tokens_are_trained_on(client, seeded, launcher):
    result = seeded[0]  # with client=renderer
    if client == "tokens":
        result = launcher.succeed("stop-tokens", *SHORT, STOP, "client=tokens", warm=COLD)
    for _, messages, _, _ in said(result):
        turns = [m["content"] for m in messages if m["role"] == "assistant"]
        assert not any(letter in turn for turn in turns for letter in LETTERS)
    # vLLM agrees with the trainer on every token, the stop text's tokens included.
    assert all(line["mismatch/sampled_mean_abs"] < 1e-4 for line in result.metrics)
    # The server's template forks if the policy samples bytes that are not text.
    assert client == "tokens" or all(line["rollout/forks"] == 0 for line in result.metrics)


LIMITED = ["sampler.top_p=0.9", "sampler.top_k=24", "sampler.temperature=0.8"]


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
