"""Conversations out of files: a turn that was cut off is learned without an end."""

import json
from itertools import islice
from random import Random

import pytest

from envs.episode import StopReason
from envs.messages import assistant, tool_call, user
from rl.sampling.transcripts import TranscriptSampler, read_conversations
from tests.support.scripted import IM_END, ScriptedEnv, tiny_renderer


def written(folder, *lines) -> str:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(last, reason, reward=1.0):
    return {"messages": [user("hi"), last], "reward": reward, "stop_reason": reason}


@pytest.mark.parametrize(
    ("reason", "ended"),
    [("stop", True), ("max_turns", True), ("max_tokens", False), ("context", False)],
)
def test_only_a_turn_that_the_policy_ended_is_learned_with_its_end(tmp_path, reason, ended):
    path = written(tmp_path, line(assistant("good"), reason))
    sampler = TranscriptSampler(path=path, min_reward=None, max_staleness=0)

    (rollout,) = sampler.group(ScriptedEnv(), tiny_renderer(), Random(0), 1, 256)

    (row,) = rollout.rows
    assert row.token_ids[row.completion_mask].tolist() == [*b"good", *([IM_END] if ended else [])]
    assert rollout.stop_reason is (StopReason.STOP if ended else StopReason.MAX_TOKENS)


def test_a_conversation_longer_than_a_row_is_left_out_unless_all_are(tmp_path, caplog):
    path = written(tmp_path, line(assistant("short"), "stop"), line(assistant("x" * 300), "stop"))
    sampler = TranscriptSampler(path=path, min_reward=None, max_staleness=0)
    group = sampler.group(ScriptedEnv(), tiny_renderer(), Random(0), 16, 256)
    assert {rollout.messages[-1]["content"] for rollout in group} == {"short"}
    assert len(group) == 16
    assert {record.getMessage() for record in caplog.records} == {
        "demonstrations longer than max_seq_len=256 are skipped"
    }
    with pytest.raises(ValueError, match=r"but max_seq_len=4: set model"):
        sampler.group(ScriptedEnv(), tiny_renderer(), Random(0), 16, 4)


def test_a_thought_or_a_call_that_was_cut_off_is_left_out(tmp_path):
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    path = written(
        tmp_path,
        line(thought, "max_tokens"),
        line(tool_call("look", content="so"), "context"),
        line(thought, "stop"),
    )
    assert read_conversations(path, None) == [("", [user("hi"), thought])]


def test_lines_below_min_reward_or_without_one_are_left_out(tmp_path):
    lines = [line(assistant(str(r)), "stop", r) for r in (0.0, 0.5, 1.0, None)]
    path = written(tmp_path, *lines)
    kept = read_conversations(path, 0.5)
    assert [messages[-1]["content"] for _, messages in kept] == ["0.5", "1.0"]
    assert len(read_conversations(path, None)) == 4
    assert len(read_conversations(path, 0.6)) == 1
    sampler = TranscriptSampler(path=path, min_reward=0.5, max_staleness=0)
    drawn = [m[-1]["content"] for m in islice(sampler.conversations(ScriptedEnv(), Random(0)), 20)]
    assert set(drawn) == {"0.5", "1.0"}
    with pytest.raises(ValueError, match=r"a reward of at least sampler.min_reward=2.0: correct"):
        TranscriptSampler(path=path, min_reward=2.0, max_staleness=0)


def test_files_below_the_home_folder_are_read_in_the_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in "cab":
        (tmp_path / name).mkdir()
        written(tmp_path / name, line(assistant(name), "stop"))
    found = read_conversations("~/*/rollouts.jsonl", None)
    assert [messages[-1]["content"] for _, messages in found] == ["a", "b", "c"]


@pytest.mark.parametrize("odd", [{"prompt": "hi"}, {"messages": "hi"}, {"messages": {"a": 1}}])
def test_a_line_that_is_no_conversation_is_named(tmp_path, odd):
    path = written(tmp_path, line(assistant("good"), "stop"), odd)
    with pytest.raises(
        ValueError, match=r"rollouts.jsonl, line 2: write a JSON object with `messages`"
    ):
        read_conversations(path, None)


def test_a_separator_of_unicode_within_a_text_ends_no_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps(line(assistant(text), "stop"), ensure_ascii=False) + "\n")
    sampler = TranscriptSampler(path=str(path), min_reward=None, max_staleness=0)
    assert next(sampler.conversations(ScriptedEnv(), Random(0)))[-1]["content"] == text


def test_an_environment_of_a_mixture_is_shown_its_own_lines_and_those_of_nobody(tmp_path):
    named = [{**line(assistant(name), "stop"), "env": name} for name in ("scripted", "words")]
    env = ScriptedEnv()
    env.name = "words"

    def drawn(*lines):
        path = written(tmp_path / f"{len(lines)}", *lines)
        sampler = TranscriptSampler(path=path, min_reward=None, max_staleness=0)
        return {m[-1]["content"] for m in islice(sampler.conversations(env, Random(0)), 30)}

    for count in (1, 2, 3):
        (tmp_path / f"{count}").mkdir()
    assert drawn(*named) == {"words"}
    assert drawn(*named, line(assistant("any"), "stop")) == {"words", "any"}
    assert drawn(named[0]) == {"scripted"}  # of another name's run: all that there is
