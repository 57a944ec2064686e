"""A demonstration has the tokens of a rollout in which the policy answered like the expert."""

from functools import partial
from itertools import islice, repeat
from random import Random

import numpy as np
import pytest

from envs.episode import StopReason
from envs.protocol import Environment
from envs.reverse_text import ReverseText
from rl.model.tokenizer import load_renderer
from rl.sampling.demonstrations import DemonstrationSampler, tokenize
from tests.support.scripted import tiny_model, tiny_renderer, tiny_tokenizer

RENDERER, TOKENIZER = tiny_renderer(), tiny_tokenizer()
SAMPLER = DemonstrationSampler(max_staleness=4, corruption_rate=0.0)
SIZES = {"min_length": 3, "max_length": 8, "num_train": 50, "num_eval": 50}
ENV = ReverseText(**SIZES, reward_weights={"exact": 1.0})


def test_the_mask_covers_the_answer_and_its_stop_token():
    group = SAMPLER.group(ENV, RENDERER, Random(5), 8, 256)
    assert len({rollout.messages[0]["content"] for rollout in group}) == 8  # all fresh
    for rollout in group:
        (row,) = rollout.rows
        prompt = RENDERER.render_ids(rollout.messages[:1], add_generation_prompt=True)
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert not row.completion_mask[: len(prompt)].any()
        assert row.completion_mask[len(prompt) :].all()
        said = TOKENIZER.decode(row.token_ids[row.completion_mask])
        assert said == rollout.messages[1]["content"] + "<|im_end|>"


def test_a_group_has_reward_1_and_no_versions():
    assert (SAMPLER.uses_vllm, SAMPLER.seeded, SAMPLER.temperature) == (False, False, 1.0)
    group = SAMPLER.group(ENV, RENDERER, Random(5), 4, 256)
    assert len(group) == 4
    for rollout in group:
        assert (rollout.reward, rollout.turns, rollout.stop_reason) == (1.0, 1, StopReason.STOP)
        (row,) = rollout.rows
        np.testing.assert_array_equal(row.token_versions, np.full(len(row.token_ids), -1))
        np.testing.assert_array_equal(row.rollout_logprobs, np.zeros(len(row.token_ids)))
        dtypes = (row.token_ids.dtype, row.completion_mask.dtype, row.rollout_logprobs.dtype)
        assert (*dtypes, row.token_versions.dtype) == (np.int32, np.bool_, np.float32, np.int32)


def test_a_group_depends_on_its_rng_alone():
    first, again, other = (
        [r.messages for r in SAMPLER.group(ENV, RENDERER, Random(seed), 4, 256)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_demonstrations_that_end_are_reported_with_their_environment():
    class Two(ReverseText):
        def demonstrations(self, rng):
            return islice(super().demonstrations(rng), 2)

    env = Two(**SIZES, reward_weights={"exact": 1.0})
    assert len(SAMPLER.group(env, RENDERER, Random(5), 2, 256)) == 2
    with pytest.raises(ValueError, match=r"environment 'reverse-text' ended, but .* needs 3: let"):
        SAMPLER.group(env, RENDERER, Random(5), 3, 256)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
MANY_TURNS = [
    {"role": "system", "content": "Übung"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "eno"},
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "zwei 🙂"},
]


def spans(row):
    """Return the decoded text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.completion_mask, [0]])))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [TOKENIZER.decode(row.token_ids[start:end]) for start, end in pairs]


def test_every_turn_of_a_long_conversation_is_trained_in_one_row():
    (row,) = tokenize(RENDERER, MANY_TURNS, 1000)
    assert spans(row) == ["eno<|im_end|>", CALLED, "zwei 🙂<|im_end|>"]
    assert list(dict.fromkeys(row.turns[row.completion_mask])) == [0, 1, 2]
    assert set(row.turns[~row.completion_mask]) == {-1}
    prompt = RENDERER.render_ids(MANY_TURNS[:-1], add_generation_prompt=True)
    assert row.token_ids[: len(prompt)].tolist() == prompt  # the last prompt, whole
    (rollout,) = SAMPLER.group(told(repeat(MANY_TURNS)), RENDERER, Random(0), 1, 1000)
    assert rollout.turns == 3


def told(conversations):
    """Return an environment whose expert tells these conversations."""
    return type("Telling", (Environment,), {"demonstrations": lambda *_: iter(conversations)})()


@pytest.mark.parametrize("count", [99, 100])
def test_a_hundred_conversations_in_a_row_that_are_too_long_end_the_run(count):
    short, long = ([{"role": "user", "content": "a"}, said("b" * n)] for n in (1, 99))
    group = partial(SAMPLER.group, told([*[long] * count, short] * 2), RENDERER, Random(0), 2)
    if count < 100:
        assert [rollout.messages for rollout in group(64)] == [short] * 2
    else:
        with pytest.raises(ValueError, match="but max_seq_len=64: set"):
            group(64)


def test_thinking_is_trained_and_a_format_that_drops_it_from_history_forks(tmp_path):
    folder = tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ '<think>' }}")  # a model that thinks
    thinker = load_renderer(folder, "qwen3")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    rows = tokenize(thinker, messages, 1000)
    said = [spans(row) for row in rows]
    assert said == [["<think>\nhm\n</think>\n\nb<|im_end|>"], ["d<|im_end|>"]]
    assert "hm" not in TOKENIZER.decode(rows[1].token_ids)
    assert [set(row.turns[row.completion_mask]) for row in rows] == [{0}, {1}]


def test_a_conversation_longer_than_a_row_is_refused_with_both_lengths():
    (row,) = tokenize(RENDERER, MANY_TURNS, 1000)
    length = len(row.token_ids)
    tokenize(RENDERER, MANY_TURNS, length)
    with pytest.raises(ValueError, match=f"has {length} tokens, but max_seq_len={length - 1}"):
        tokenize(RENDERER, MANY_TURNS, length - 1)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (MANY_TURNS[:2], "no assistant message after its prompt"),
        (MANY_TURNS[:4], "does not end with an assistant"),
        (MANY_TURNS[2:3], "no assistant message after its prompt"),
    ],
)
def test_an_incomplete_conversation_is_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        tokenize(RENDERER, messages, 1000)


def test_an_environment_without_an_expert_is_refused():
    with pytest.raises(ValueError, match="no scripted expert"):
        SAMPLER.group(Environment(), RENDERER, Random(0), 2, 256)


class Saying(Environment):
    """The expert always gives the same answers."""

    def __init__(self, *turns):
        self.turns = turns

    def demonstrations(self, rng):
        while True:
            yield [{"role": "user", "content": "ab"}, *({**turn} for turn in self.turns)]


def said(content):
    return {"role": "assistant", "content": content}


def contents(env, rate, count=200):
    told = DemonstrationSampler(max_staleness=0, corruption_rate=rate).conversations(env, Random(1))
    return [[message["content"] for message in next(told)] for _ in range(count)]


def test_a_corruption_swaps_two_letters_of_the_last_turn():
    told = contents(Saying(said("kept"), said("abbc")), rate=1.0)
    assert {tuple(one[:-1]) for one in told} == {("ab", "kept")}
    assert {one[-1] for one in told} == {"babc", "abcb"}  # never the two that are alike


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.6, 0.5, 0.7), (1.0, 1, 1)])
def test_the_corruption_rate_is_the_share_of_corrupted_conversations(rate, low, high):
    told = contents(Saying(said("abc")), rate)
    assert low <= sum(one[-1] != "abc" for one in told) / len(told) <= high


@pytest.mark.parametrize("content", [None, "", "a", "aaa"])
def test_an_answer_without_two_different_letters_is_not_corrupted(content):
    assert {tuple(one) for one in contents(Saying(said(content)), rate=1.0)} == {("ab", content)}
