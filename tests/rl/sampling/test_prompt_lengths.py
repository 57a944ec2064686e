"""Prompts that leave no room for an answer are left out, counted, and refused where all do."""

import asyncio
import logging

import pytest

from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from envs.protocol import Pool
from rl.inference.live_version import LiveVersion
from rl.sampling.prompt_lengths import PromptLengths
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import PREFIX, SAMPLER, ScriptedClient, ScriptedEnv, tiny_renderer


def find(word: str) -> str:
    """Find a word."""
    return word


def examples(*lengths: int, env: str = "scripted") -> list[Example]:
    """Prompts of these lengths in tokens, without tools."""
    return [Example(i, env, [user("x" * (n - PREFIX + 2))]) for i, n in enumerate(lengths)]


def lengths(env, pools, max_seq_len, max_prompt_len=None) -> PromptLengths:
    chat = RendererChat(SAMPLER, tiny_renderer(), ScriptedClient(), max_seq_len, LiveVersion(7))
    return PromptLengths(env, pools, chat, max_seq_len, max_prompt_len)


def kept(env, pools, *limits):
    """The examples that are drawn, by pool, once all were measured."""
    measured = lengths(env, pools, *limits)
    measured.measure(60.0)
    return [sorted({e.id for e in pool.examples}) for pool in measured.pools]


def test_what_fills_the_row_is_left_out_and_counted(caplog):
    pools = [Pool(1.0, examples(50, 99, 100, 120))]
    with caplog.at_level(logging.WARNING):
        assert kept(ScriptedEnv(), pools, 100) == [[0, 1]]
    assert (
        "2 of 4 prompts of env 'scripted' fill max_seq_len and are left out: the longest has 120 "
        "tokens: raise model.max_seq_len (max_seq_len=100)" in caplog.text
    )


def test_prompts_that_fit_are_taken_as_they_are(caplog):
    pools = [Pool(1.0, examples(20, 99))]
    assert kept(ScriptedEnv(), pools, 100) == [[0, 1]]
    assert caplog.text == ""


def test_the_schemas_of_the_tools_count_and_are_named():
    env = ScriptedEnv()
    env.tools = [find]
    with pytest.raises(ValueError, match="all 2 prompts of env 'scripted' fill max_seq") as caught:
        kept(env, [Pool(1.0, examples(50, 60))], 256)
    assert "of them the tools' schemas: raise model.max_seq_len (max_seq_len=256)" in str(
        caught.value
    )
    assert "model.describe_tools=false" in str(caught.value)


def test_each_environment_of_a_mixture_is_measured_by_its_own_prompts():
    one, two = ScriptedEnv(), ScriptedEnv()
    two.holds_conversation = True
    env = Mixture(envs={"one": one, "two": two}, weights={"one": 1.0, "two": 1.0})
    pools = [Pool(1.0, examples(50, 300, env="one")), Pool(1.0, examples(300, 300, env="two"))]
    assert kept(env, pools, 100) == [[0], [0, 1]]


def test_a_prompt_that_cannot_be_rendered_is_left_to_its_rollouts():
    broken = Example(7, "scripted", [{"content": "no role" * 100}])
    assert kept(ScriptedEnv(), [Pool(1.0, [broken])], 100) == [[7]]


def test_prompts_above_a_limit_of_the_users_own_are_left_out_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        assert kept(ScriptedEnv(), [Pool(1.0, examples(50, 80, 81, 99))], 100, 80) == [[0, 1]]
    assert (
        "2 of 4 prompts of env 'scripted' have more tokens than sampler.max_prompt_len=80 and are "
        "left out: the longest has 99 tokens: raise it, or set it to null" in caplog.text
    )


def test_where_all_are_above_it_the_run_is_refused_with_the_numbers():
    sentence = (
        "all 2 prompts of env 'scripted' have more tokens than sampler.max_prompt_len=40, so "
        "nothing can be answered: the shortest has 50 tokens: raise it, or set it to null"
    )
    with pytest.raises(ValueError, match=sentence):
        kept(ScriptedEnv(), [Pool(1.0, examples(50, 60))], 100, 40)


def test_a_prompt_of_a_hundred_thousand_tokens_is_named_by_its_length():
    with pytest.raises(ValueError, match=r"fill max_seq_len, so .* shortest has 100000 tokens"):
        kept(ScriptedEnv(), [Pool(1.0, examples(100_000))], 256)


def test_a_place_has_the_same_example_however_far_anybody_had_measured():
    prompts = examples(*[50, 300] * 20)
    before, after = (lengths(ScriptedEnv(), [Pool(1.0, prompts)], 100) for _ in range(2))
    after.measure(60.0)
    drawn = [example.id for example in before.pools[0].examples]
    assert drawn == [example.id for example in after.pools[0].examples]
    assert drawn[::2] == list(range(0, 40, 2))  # what fits stands in its own place
    assert len(set(drawn[1::2])) > 5  # and not one example for all that do not


def test_an_order_may_look_at_the_first_few_examples_as_in_any_list():
    (pool,) = lengths(ScriptedEnv(), [Pool(1.0, examples(50, 60, 300))], 100).pools
    assert [example.id for example in pool.examples[:2]] == [0, 1]
    assert pool.examples[-1:] == [pool.examples[2]]


def test_what_nobody_has_measured_is_measured_when_it_is_drawn():
    measured = lengths(ScriptedEnv(), [Pool(1.0, examples(300, 300))], 100)
    with pytest.raises(ValueError, match="all 2 prompts"):
        measured.pools[0].examples[1]


def test_the_rest_is_measured_beside_the_run_and_then_said(caplog):
    measured = lengths(ScriptedEnv(), [Pool(1.0, examples(*[300, 50] * 50))], 100)
    measured.measure(0.0)
    with caplog.at_level(logging.WARNING):
        asyncio.run(measured.measure_rest())
        asyncio.run(measured.measure_rest())
    assert caplog.text.count("50 of 100 prompts") == 1
