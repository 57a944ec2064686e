"""The files, the output and the errors of an evaluation."""

import asyncio
import gzip
import json
import re
from base64 import b64decode
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from envs.episode import Example, StopReason
from envs.messages import assistant, tool_call, user
from lab.evaluation.served import as_run_failures
from lab.evaluation.standalone import _run_coroutine, write_files
from lab.evaluation.table import result_lines
from rl.config.schema import ConfigError
from rl.evaluation.summary import PlayedExample, summarise
from rl.records import Rollout
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder


def rollout(reward: float | None, *messages, **known) -> Rollout:
    facts = {"messages": [user("go"), *messages], "rewards": {}, "turns": 1}
    facts |= {"rows": (), "stop_reason": StopReason.STOP, "generation_time": 0.0}
    return Rollout(**{**facts, "reward": reward, **known})


def played(*rollouts: Rollout, env: str = "mine", **info) -> PlayedExample:
    return PlayedExample(Example(id=4, env=env, messages=[], info=info), rollouts)


def written(folder: Path, *examples: PlayedExample) -> dict:
    """Return the content of the page."""
    write_files(RunFolder(folder), examples, summarise(examples, 1.0), "my/model · python e.py")
    return page_of(folder)


def page_of(folder: Path) -> dict:
    text = (folder / "rollouts.html").read_text(encoding="utf-8")
    return json.loads(gzip.decompress(b64decode(re.search(r'id="embedded">([^<]+)<', text)[1])))


def test_the_page_has_every_rollout_with_reward_stop_reason_and_the_right_answer(tmp_path):
    tool = {"role": "tool", "tool_call_id": "call_0", "content": "cats purr"}
    right = rollout(0.25, tool_call("search", query="cat"), tool, assistant("purring"))
    failed = rollout(None, error="it broke", stop_reason=StopReason.ENV_ERROR)
    content = written(tmp_path, played(right, failed, answer="<42>", level=3))
    first, second = content["runs"][0]["rollouts"]
    assert first["messages"][2:] == [tool, assistant("purring")]
    assert (first["reward"], first["stop_reason"], first["expected"]) == (0.25, "stop", "<42>")
    assert (second["reward"], second["error"]) == (None, "it broke")
    assert content["runs"][0]["table"]["columns"]["stop"] == ["stop", "env_error"]
    assert content["note"] == "reward 0.250 · my/model · python e.py"
    assert json.loads((tmp_path / "summary.json").read_text())["num_scored"] == 1


@pytest.mark.parametrize(
    "message",
    [
        assistant("half a \ud83d pair"),
        {"role": ["\ud800"], "content": {"a": float("nan"), "b": {1, 2}}},
        {"role": "tool", "content": b"\xff", "reasoning_content": {"\ud800": 1}},
        *("no message at all", None),
        *(assistant("x") | {"tool_calls": calls} for calls in ("calls", 7, [None, 7, {}])),
        assistant("x") | {"tool_calls": [{"function": {"name": ["x"], "arguments": {1: {2}}}}]},
    ],
    ids=str,
)
def test_a_message_of_any_shape_is_written_and_printed(message, tmp_path):
    odd = played(rollout(0.5, message, error="\ud800"), env="\ud800")
    assert written(tmp_path, odd)["runs"][0]["table"]["columns"]["reward"] == [0.5]
    assert "1 x " in table(odd)


def test_a_page_contains_the_first_groups_of_a_large_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.viewer.export.MOST_ROLLOUTS", 5)
    examples = [played(rollout(1.0), rollout(0.0)) for _ in range(4)]
    examples = [replace(one, example=replace(one.example, id=i)) for i, one in enumerate(examples)]
    content = written(tmp_path, *examples)
    assert len(content["runs"][0]["rollouts"]) == 4
    assert content["note"].endswith("(the first 4 rollouts)")
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 8
    monkeypatch.setattr("lab.viewer.export.MOST_ROLLOUTS", 8)
    whole = written(tmp_path, *examples)
    assert (len(whole["runs"][0]["rollouts"]), whole["note"]) == (
        8, "reward 0.500 ± 0.000 · my/model · python e.py",
    )  # fmt: skip


def test_in_a_notebook_which_has_an_event_loop_a_coroutine_is_run_to_its_end():
    result = [played(rollout(1.0))]

    async def work():
        return result

    async def cell():
        return _run_coroutine(work())

    assert asyncio.run(cell()) is result


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("bad"), RunFailed("bad")),
        (
            ExceptionGroup("", [ExceptionGroup("", [RunFailed("gone"), KeyError()])]),
            RunFailed("gone"),
        ),
        (ConfigError(["bad"]), ConfigError(["bad"])),
        (KeyError("bug"), KeyError("bug")),
        (ExceptionGroup("", [KeyError("bug")]), ExceptionGroup("", [KeyError("bug")])),
    ],
    ids=repr,
)
def test_an_error_that_is_not_of_this_program_becomes_a_failure_of_the_run(error, raised):
    with pytest.raises(type(raised)) as caught, as_run_failures():
        raise error
    assert str(caught.value) == str(raised)


def table(*examples: PlayedExample) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(result_lines(summarise(examples, 1.0), 1.0, "outputs/x"))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("rewards", "advice"),
    [
        ((0.0, 0.0), "pass@1 is 0.0%: before training, choose easier examples"),
        ((1.0,) + 20 * (0.0,), "pass@1 is 4.8%: before training, choose easier examples"),
        ((1.0,) + 19 * (0.0,), None),
        (4 * (1.0,) + (0.0,), None),
        (5 * (1.0,) + (0.0,), "pass@1 is 83.3%: before training, choose harder examples"),
        ((1.0, 1.0), "pass@1 is 100.0%: before training, choose harder examples"),
        ((None, None), None),
    ],
)
def test_examples_that_are_too_hard_or_too_easy_for_training_are_named(rewards, advice):
    text = " ".join(table(*(played(rollout(reward)) for reward in rewards)).split())
    assert ("docs/troubleshooting.md, no spread" in text) == (advice is not None)
    assert (advice or "") in text


def test_every_row_of_the_table_has_its_number_in_its_unit():
    known = {"rewards": {"exact": 1.0}, "turns": 3, "tool_calls": 2, "tool_errors": 1}
    lines = table(
        played(rollout(1.0, **known), rollout(0.0, **{**known, "rewards": {"exact": 0.0}})),
        played(rollout(1.0, **known), rollout(None, stop_reason=StopReason.ENV_ERROR)),
    )
    rows = dict(re.findall(r"^ *(\S.*?) {2,}(\S.*?) *$", lines, re.MULTILINE))
    assert rows.pop("reward").startswith("0.667 ± ")
    assert rows == {
        **{"examples": "2", "rollouts": "4", "not scored": "1", "exact": "0.667"},
        **{"pass@1": "75.0%", "pass@2": "100.0%", "no spread": "0.0%"},
        **{"mean length": "0.0 tokens", "max length": "0", "turns": "2.50"},
        **{"tool calls": "1.50", "tool errors": "0.75"},
        **{"stop: stop": "75.0%", "stop: env_error": "25.0%"},
        "outputs/x/": "summary.json, rollouts.jsonl, rollouts.html",
    }


def test_names_are_not_interpreted_as_markup():
    odd = rollout(1.0, error="[/red] broke", rewards={"[bold]mine": 1.0, "[/]": 0.5})
    lines = table(played(odd, env="[/env]"), played(rollout(0.0), env="[red]b"))
    for name in ("[/env]", "[red]b", "[bold]mine", "[/]", "[/red] broke"):
        assert name in lines
