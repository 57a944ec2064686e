"""A demonstration has the tokens of a rollout in which the policy answered like the expert.

Demonstrations of files are learned without an end if their last turn was cut off.
"""

import json
from itertools import count, islice, repeat
from random import Random

import numpy as np
import pytest

from envs.episode import StopReason
from envs.messages import assistant, tool_call, user
from envs.protocol import Environment
from envs.reverse_text import ReverseText
from rl.model.tokenizer import load_renderer
from rl.sampling import demonstrations
from rl.sampling.demonstrations import DemonstrationSampler, tokenize
from rl.sampling.transcripts import TranscriptSampler, read_conversations
from tests.support.scripted import (
    IM_END,
    ScriptedEnv,
    tiny_model,
    tiny_renderer,
    tiny_tokenizer,
    trained,
)

RENDERER, TOKENIZER = tiny_renderer(), tiny_tokenizer()
SAMPLER = DemonstrationSampler(max_staleness=4, corruption_rate=0.0)


def test_a_group_has_reward_1_no_versions_and_trains_answers_with_their_stop_tokens():
    assert (SAMPLER.uses_vllm, SAMPLER.seeded, SAMPLER.temperature) == (False, False, 1.0)
    sizes = {"min_length": 3, "max_length": 8, "num_train": 50, "num_eval": 50}
    env = ReverseText(**sizes, reward_weights={"exact": 1.0})
    group = SAMPLER.group(env, RENDERER, Random(5), 8, 256)
    assert len({rollout.messages[0]["content"] for rollout in group}) == 8  # all fresh
    for rollout in group:
        assert (rollout.reward, rollout.turns, rollout.stop_reason) == (1.0, 1, StopReason.STOP)
        (row,) = rollout.rows
        prompt = RENDERER.render_ids(rollout.messages[:1], add_generation_prompt=True)
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert not row.completion_mask[: len(prompt)].any()
        assert row.completion_mask[len(prompt) :].all()
        said = TOKENIZER.decode(trained(row))
        assert said == rollout.messages[1]["content"] + "<|im_end|>"
        assert row.token_versions.tolist() == [-1] * row.length
        assert row.rollout_logprobs.tolist() == [0] * row.length
        dtypes = (row.token_ids.dtype, row.completion_mask.dtype, row.rollout_logprobs.dtype)
        assert (*dtypes, row.token_versions.dtype) == (np.int32, np.bool_, np.float32, np.int32)
    # Demonstrations that end are reported with their environment.
    two = told([[user("a"), assistant("b")]] * 2)
    two.name = "two"
    with pytest.raises(ValueError, match=r"environment 'two' ended, but .* needs 3: let"):
        SAMPLER.group(two, RENDERER, Random(5), 3, 256)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
MANY_TURNS = [
    {"role": "system", "content": "Übung"},
    *(user("one"), assistant("eno"), user("add")),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    *({"role": "tool", "content": "2"}, assistant("zwei 🙂")),
]


def spans(row):
    """Return the decoded text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.completion_mask, [0]])))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [TOKENIZER.decode(row.token_ids[start:end]) for start, end in pairs]


def test_every_turn_of_a_long_conversation_is_trained_in_one_row():
    (row,) = tokenize(RENDERER, MANY_TURNS, 1000)
    tokenize(RENDERER, MANY_TURNS, row.length)
    said = f"has {row.length} tokens, but max_seq_len={row.length - 1}"
    with pytest.raises(ValueError, match=said):
        tokenize(RENDERER, MANY_TURNS, row.length - 1)
    assert spans(row) == ["eno<|im_end|>", CALLED, "zwei 🙂<|im_end|>"]
    assert list(dict.fromkeys(row.turns[row.completion_mask])) == [0, 1, 2]
    assert set(row.turns[~row.completion_mask]) == {-1}
    prompt = RENDERER.render_ids(MANY_TURNS[:-1], add_generation_prompt=True)
    assert row.token_ids[: len(prompt)].tolist() == prompt  # the last prompt, whole
    (rollout,) = SAMPLER.group(told(repeat(MANY_TURNS)), RENDERER, Random(0), 1, 1000)
    assert rollout.turns == 3
    for end in (2, 4):  # after a question, and after a question and an answer
        with pytest.raises(ValueError, match="ends without an answer"):
            tokenize(RENDERER, MANY_TURNS[:end], 1000)


def told(conversations):
    """Return an environment whose expert tells these conversations."""
    return type("Telling", (Environment,), {"demonstrations": lambda *_: iter(conversations)})()


def test_conversations_that_are_too_long_are_left_out_until_a_hundred_in_a_row_end_the_run(
    caplog, monkeypatch
):
    monkeypatch.setattr(demonstrations, "_NUM_SKIPPED", count(1))
    short, long = ([user("a"), assistant("b" * n)] for n in (1, 99))

    def group(num_long):
        env = told([*[long] * num_long, short] * 2)
        return SAMPLER.group(env, RENDERER, Random(0), 2, 64)

    assert [rollout.messages for rollout in group(99)] == [short] * 2
    first, second, *_ = (record.getMessage() for record in caplog.records)
    assert first.startswith("demonstrations skipped so far: 1. Newest: the demonstration after 'a'")
    assert second.startswith("demonstrations skipped so far: 2. ")
    assert len(caplog.records) == 8  # the 1st, 2nd, 4th, ... and 128th of 198
    with pytest.raises(ValueError, match="but max_seq_len=64: set max_seq_len="):
        group(100)


def test_thinking_is_trained_and_a_format_that_drops_it_from_history_forks(tmp_path):
    folder = tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ '<think>' }}")  # a model that thinks
    thinker = load_renderer(folder, "qwen3")
    thought = assistant("b") | {"reasoning_content": "hm"}
    messages = [user("a"), thought, user("c"), assistant("d")]
    rows = tokenize(thinker, messages, 1000)
    assert list(map(spans, rows)) == [["<think>\nhm\n</think>\n\nb<|im_end|>"], ["d<|im_end|>"]]
    assert "hm" not in TOKENIZER.decode(rows[1].token_ids)
    assert [set(row.turns[row.completion_mask]) for row in rows] == [{0}, {1}]


def contents(rate, *answers, count=200):
    """Return the texts of conversations whose expert always gives these answers."""
    env = told(repeat([user("ab"), *map(assistant, answers)]))
    sampler = DemonstrationSampler(max_staleness=0, corruption_rate=rate)
    found = islice(sampler.conversations(env, Random(1)), count)
    return [[message["content"] for message in messages] for messages in found]


def test_a_corruption_swaps_two_different_letters_of_the_last_turn():
    found = contents(1.0, "kept", "abbc")
    assert {tuple(one[:-1]) for one in found} == {("ab", "kept")}
    assert {one[-1] for one in found} == {"babc", "abcb"}  # never the two that are alike
    for content in (None, "a", "aaa"):
        assert {tuple(one) for one in contents(1.0, content)} == {("ab", content)}


def test_the_corruption_rate_is_the_share_of_corrupted_conversations():
    for rate, low, high in ((0.0, 0, 0), (0.6, 0.5, 0.7), (1.0, 1, 1)):
        found = contents(rate, "abc")
        assert low <= sum(one[-1] != "abc" for one in found) / len(found) <= high


def written(folder, *lines) -> str:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(last, reason="stop", reward=1.0):
    return {"messages": [user("hi"), last], "reward": reward, "stop_reason": reason}


def from_file(path, min_reward=None) -> TranscriptSampler:
    return TranscriptSampler(path=str(path), min_reward=min_reward, max_staleness=0)


def drawn_from(path, env) -> set[str]:
    """Return the last texts of 30 conversations."""
    found = from_file(path).conversations(env, Random(0))
    return {messages[-1]["content"] for messages in islice(found, 30)}


@pytest.mark.parametrize(("reason", "ended"), [("max_turns", True), ("context", False)])
def test_only_a_turn_that_the_policy_ended_is_learned_with_its_end(tmp_path, reason, ended):
    sampler = from_file(written(tmp_path, line(assistant("good"), reason)))
    (rollout,) = sampler.group(ScriptedEnv(), RENDERER, Random(0), 1, 256)
    (row,) = rollout.rows
    assert trained(row) == [*b"good", *([IM_END] if ended else [])]
    assert rollout.stop_reason is (StopReason.STOP if ended else StopReason.MAX_TOKENS)


def test_a_thought_or_a_call_that_was_cut_off_is_left_out(tmp_path):
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    cut = line(tool_call("look", content="so"), "context")
    invalid = tool_call("look", content="so")
    invalid["tool_calls"][0]["error"] = "the arguments are not JSON"
    broken = {**line(thought), "messages": [user("hi"), invalid, thought]}
    path = written(tmp_path, line(thought, "max_tokens"), cut, broken, line(thought))
    assert read_conversations(path, None)[0] == [("", [user("hi"), thought])]
    without = {"role": "assistant", "content": None}
    path = written(tmp_path, line(without, "max_tokens", 1.0), line(without, "stop", 0.0))
    assert read_conversations(path, 0.5) == ([], 2)


def test_lines_below_min_reward_or_without_one_are_left_out(tmp_path):
    lines = [line(assistant(str(r)), "stop", r) for r in (0.0, 0.5, 1.0, None)]
    path = written(tmp_path, *lines)
    kept, _ = read_conversations(path, 0.5)
    assert [messages[-1]["content"] for _, messages in kept] == ["0.5", "1.0"]
    assert len(read_conversations(path, None)[0]) == 4
    with pytest.raises(ValueError, match=r"0 of 4 .* a reward of at least 2.0: correct"):
        from_file(path, 2.0)


def test_files_below_the_home_folder_are_read_in_the_order_of_their_names(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in "cab":
        (tmp_path / name).mkdir()
        written(tmp_path / name, line(assistant(name)), line(user("no answer")))
    found, num_lines = read_conversations("~/*/rollouts.jsonl", None)
    assert [messages[-1]["content"] for _, messages in found] == ["a", "b", "c"]
    assert num_lines == 6
    assert drawn_from("~/*/rollouts.jsonl", ScriptedEnv()) == {"a", "b", "c"}
    assert "3 of 6 conversations have a trainable assistant message at" in caplog.text


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({"prompt": "hi"}, "write a JSON object with `messages`"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 1 has the role None: use"),
        ({"messages": [user(None)]}, "message 1 has the content None: write text"),
        ({"messages": [{"role": "tool", "content": 5}]}, "message 1 has the content 5: write text"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, odd, problem):
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    thought = {"role": "assistant", "reasoning_content": "hm"}
    good = {"messages": [user([{"type": "text", "text": "a"}]), called, thought, assistant("")]}
    path = written(tmp_path, good, odd)
    with pytest.raises(ValueError, match=f"rollouts.jsonl, line 2: {problem}"):
        from_file(path)
    with pytest.raises(ValueError, match=r"/no.jsonl: no such file .*: correct the path"):
        from_file(tmp_path / "no.jsonl")


def test_an_environment_of_a_mixture_is_shown_its_own_lines_and_those_of_nobody(tmp_path):
    named = [{**line(assistant(name)), "env": name} for name in ("scripted", "words")]
    env = ScriptedEnv()
    env.name = "words"

    def drawn(*lines):
        (folder := tmp_path / f"{len(lines)}").mkdir()  # each path is read once
        return drawn_from(written(folder, *lines), env)

    assert drawn(*named) == {"words"}
    assert drawn(*named, line(assistant("any"))) == {"words", "any"}
    assert drawn(named[0]) == {"scripted"}  # of another name's run: all that there is
