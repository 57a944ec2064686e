"""Prompts that leave no room for an answer are left out, counted, and refused where all do."""

import logging

import pytest

from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from envs.protocol import Pool
from rl.inference.live_version import LiveVersion
from rl.sampling.prompt_lengths import fitting
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import PREFIX, SAMPLER, ScriptedClient, ScriptedEnv, tiny_renderer


def find(word: str) -> str:
    """Find a word."""
    return word


def examples(*lengths: int, env: str = "scripted") -> list[Example]:
    """Prompts of these lengths in tokens, without tools."""
    return [Example(i, env, [user("x" * (n - PREFIX + 2))]) for i, n in enumerate(lengths)]


def kept(env, pools, max_seq_len):
    chat = RendererChat(SAMPLER, tiny_renderer(), ScriptedClient(), max_seq_len, LiveVersion(7))
    return [[e.id for e in pool.examples] for pool in fitting(env, pools, chat, max_seq_len)]


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
