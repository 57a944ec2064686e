"""Whole evaluations of a scripted endpoint, and the files, output and errors of evaluations."""

import asyncio
import gzip
import json
import re
from base64 import b64decode
from io import StringIO
from math import nan

import numpy as np
import pytest
import yaml
from rich.console import Console

from envs.episode import Example, StopReason
from envs.messages import assistant, user
from envs.reverse_text import ReverseText
from lab.evaluation.standalone import _run_coroutine, evaluate, write_files
from lab.evaluation.table import result_lines
from rl.config.build import build
from rl.config.schema import ConfigError
from rl.evaluation.summary import PlayedExample, summarise
from rl.records import Rollout, TrainingRow
from rl.runtime.folder import RunFolder
from tests.support.composing import composed
from tests.support.golden import golden
from tests.support.prompted_endpoint import PromptedEndpoint

OURS = ("reflection.", "num_train", "num_val", "max_calls")  # options of a prompt search


def rollout(reward, *messages, **known):
    facts = {"messages": [user("go"), *messages], "rewards": {}, "turns": 1}
    facts |= {"rows": (), "stop_reason": StopReason.STOP, "generation_time": 0.0}
    return Rollout(**{**facts, "reward": reward, **known})


def played(*rollouts, env="mine", **info):
    return PlayedExample(Example(id=4, env=env, messages=[], info=info), rollouts)


def written(folder, *examples):
    """Return the content of the page."""
    write_files(RunFolder(folder), examples, summarise(examples, 1.0), "my/model · python e.py")
    return page_of(folder)


def page_of(folder):
    text = (folder / "rollouts.html").read_text(encoding="utf-8")
    return json.loads(gzip.decompress(b64decode(re.search(r'id="embedded">([^<]+)<', text)[1])))


def test_a_message_of_any_shape_is_written_and_printed(tmp_path):
    for message in (
        {"role": ["\ud800"], "content": {"a": float("nan"), "b": {1, 2}}},
        {"role": "tool", "content": b"\xff", "reasoning_content": {"\ud800": 1}},
        "no message at all",
        *(assistant("x") | {"tool_calls": calls} for calls in ("calls", [None, 7, {}])),
        assistant("x") | {"tool_calls": [{"function": {"name": ["x"], "arguments": {1: {2}}}}]},
    ):
        (tmp_path / "rollouts.html").unlink(missing_ok=True)
        odd = played(rollout(0.5, message, error="\ud800"), env="\ud800")
        assert written(tmp_path, odd)["runs"][0]["table"]["columns"]["reward"] == [0.5]
        assert "1 x " in table(odd)


def test_in_a_notebook_which_has_an_event_loop_a_coroutine_is_run_to_its_end():
    result = [played(rollout(1.0))]

    async def work():
        return result

    async def cell():
        return _run_coroutine(work())

    assert asyncio.run(cell()) is result


def table(*examples, threshold=1.0):
    console = Console(file=StringIO(), width=110)
    console.print(result_lines(summarise(examples, threshold), threshold, "outputs/x"))
    return console.file.getvalue()


def test_other_examples_are_advised_if_nine_of_ten_groups_have_equal_rewards():
    for reward, differing, advice in ((0.0, 1, "easier"), (1.0, 1, "harder"), (0.0, 2, "no")):
        pairs = [(reward, reward)] * (10 - differing) + [(0.0, 1.0)] * differing
        lines = table(*(played(*map(rollout, pair)) for pair in pairs))
        assert re.findall(r"(\w+) examples or larger", lines) == [advice] * (2 - differing)


def row(length):
    ints, mask = np.arange(length, dtype=np.int32), np.arange(length) > 2
    return TrainingRow(ints, mask, np.zeros(length, np.float32), ints * 0, ints * 0)


def shown(examples, threshold):
    return [line.rstrip() for line in table(*examples, threshold=threshold).splitlines()]


def test_the_summary_the_table_and_the_files(tmp_path):
    """All numbers of a mixture with tools, truncation, errors and NaN, and its files."""
    tools = {"rewards": {"exact": 1.0, "f1": 0.5}, "turns": 3, "tool_calls": 4, "tool_errors": 1}
    cut = {"stop_reason": StopReason.MAX_TOKENS, "rewards": {"exact": 0.0, "f1": nan}}
    broken = {"error": "the tool broke " * 20, "stop_reason": StopReason.ENV_ERROR}
    one = [
        rollout(0.75, assistant("a"), rows=(row(9), row(2000)), **tools),
        rollout(0.25, assistant("b"), rows=(row(30),), **cut),
        *(rollout(None, assistant(""), **broken) for _ in range(2)),
    ]
    two = [rollout(1.0, assistant("c"), rows=(row(5),)), rollout(0.5, rows=(row(7),), turns=2)]
    errors = [rollout(None, error=f"error {number}", retries=2) for number in range(6)]
    some = [played(*one, env="wiki", answer="x" * 600), played(*two, env="wiki", answer=["y", 2])]
    some += [played(*two, *two, env="maths", level=3), played(*two[:1], *errors, env="maths")]
    summary = summarise(some, 0.5)
    write_files(RunFolder(tmp_path), some, summary, "my/model · python evaluate.py")
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    tables = [shown(some, 0.5), shown(some[2:3], 1.0), shown(some[2:3], 2.0)]
    found = [*tables, json.loads((tmp_path / "summary.json").read_text())]
    golden("evaluation/results", [*found, lines[:2], lines[4:7:2], summary.metrics()])


def evaluated(folder, *more):
    """Evaluate a policy that reverses words of at most four letters."""
    with PromptedEndpoint().listening() as endpoint:
        prompt = {"env.system_prompt": "'Write short words backwards.'"}
        overrides = [o for o in endpoint.overrides(**prompt) if not o.startswith(OURS)]
        overrides += [f"output_dir={folder}", "run_name=mine", "num_examples=20", *more]
        overrides += ["rollouts_per_example=2", "env.num_eval=20"]
        config = composed(*overrides, primary="evaluate")
        env = build(config["env"])()
        return evaluate(config, overrides=overrides), endpoint, env


def check_requests(endpoint, examples, *, seeded):
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


class Interrupted(ReverseText):
    num_scored = 0

    async def score(self, episode):
        Interrupted.num_scored += 1
        if Interrupted.num_scored > 10:
            raise KeyboardInterrupt
        return await super().score(episode)


def test_an_interrupted_evaluation_keeps_the_rollouts_of_finished_examples(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        evaluated(tmp_path, f"env._target_={__name__}.Interrupted", "sampler.max_concurrent=2")
    path = tmp_path / "mine" / "rollouts.incomplete.jsonl"
    assert len(path.read_text().splitlines()) == 10
    said = f"5 of 20 examples were finished: {path}"
    assert said in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(KeyboardInterrupt):  # at once, so that it keeps what the first one kept
        evaluated(tmp_path, f"env._target_={__name__}.Interrupted")
    assert len(path.read_text().splitlines()) == 10
    evaluated(tmp_path)
    assert not path.exists()


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
    folder = tmp_path / "mine"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_rollouts"], summary["reward"]) == (40, pytest.approx(expected))
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert sum(line["reward"] for line in lines) / 40 == pytest.approx(expected)
    note = page_of(folder)["note"]
    assert f" · policy at {endpoint.url} · python evaluate.py client=messages " in note
    assert "num_examples=20" in yaml.safe_load((folder / "overrides.yaml").read_text())["overrides"]
    with pytest.raises(ConfigError, match="mine"):  # an evaluation is not overwritten
        evaluated(tmp_path)
