"""Options of every environment, and mixtures: how often an environment is drawn, and its limits."""

import asyncio
from collections import Counter

import pytest

from envs.arithmetic import Arithmetic
from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from envs.protocol import Environment
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.sampling.player import Player
from tests.rl.sampling.test_player import Driving
from tests.support.composing import changed, composed
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, chat_of, play

SYSTEM = {"role": "system", "content": "Be brief."}


def told(env: Environment, **options) -> Environment:
    env.configure(**options)
    return env


@pytest.mark.parametrize("env", [ScriptedEnv(), Driving("more", "again")], ids=["reply", "play"])
def test_the_policy_reads_the_system_prompt_in_every_turn_and_the_rollout_records_it(env):
    client = ScriptedClient("x")
    (rollout,) = play(told(env, system_prompt="Be brief."), client)
    prompts = [bytes(token for token in ids if token < 256) for ids, *_ in client.requests]
    assert all(prompt.startswith(b"system\nBe brief.") for prompt in prompts)
    assert (len(rollout.rows), rollout.messages[0]) == (1, SYSTEM)


def test_a_system_prompt_replaces_the_environments_own_and_an_empty_one_removes_it(
    tmp_path, monkeypatch
):
    own = [{"role": "system", "content": "Talk."}, user("hi")]
    brief = told(ScriptedEnv(), system_prompt="Be brief.")
    assert brief.add_system_prompt(own) == [SYSTEM, user("hi")]
    # A hint is added below the question, and not below the system prompt.
    example = Example(0, brief.name, [user("hi")], {"hint": "Say good."})
    opening = brief.add_system_prompt(example.messages)
    assert brief.teacher_messages(example, opening) == [SYSTEM, user("hi\n\nSay good.")]
    assert told(ScriptedEnv(), system_prompt="").add_system_prompt(own) == [user("hi")]
    assert ScriptedEnv().add_system_prompt(own) == own
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.md").write_text("Be brief.\n")
    for given, text in (("~/p.md", "Be brief."), (" Read\nthis.txt", "Read\nthis.txt")):
        assert told(ScriptedEnv(), system_prompt=given).system_prompt == text


def sums(max_operand=9):
    options = {"operators": ["+"], "num_train": 30, "num_eval": 7}
    return Arithmetic(max_operand=max_operand, **options, reward_weights={"correct": 2.0})


def mixture():
    return Mixture(envs={"sums": sums(), "large": sums(99)}, weights={"sums": 2.0, "large": 5.0})


def test_an_impossible_option_is_refused_with_one_sentence():
    for make, options, sentence in (
        (Environment, {"system_prompt": "none.txt"}, "=none.txt is not a readable file .File"),
        (Environment, {"max_turns": 3}, "max_turns=3, but Environment has no tools and no reply"),
        (mixture, {"worlds": {}}, r"sampling contains \['worlds'\]: choose from sums, large"),
        (mixture, {"sums": {"temperature": 0.5}}, "sums.temperature: one .* own max_tokens, stop,"),
        (mixture, {"sums": {"max_tokens": 0}}, "max_tokens=0: set a whole number, at least 1"),
        (mixture, {"sums": {"stop": [""]}}, "sums.stop contains an empty text"),
    ):
        with pytest.raises(ValueError, match=sentence):
            told(make(), **({"sampling": options} if make is mixture else options))


def test_turns_and_timeouts_can_be_configured_and_are_checked_like_all_other_options():
    env = told(ScriptedEnv(("a", "b", "c")), max_turns=2, tool_timeout=3.0, max_concurrent=4)
    assert (env.max_turns, env.tool_timeout, env.max_concurrent) == (2, 3.0, 4)
    assert play(env, ScriptedClient("x"))[0].stop_reason == "max_turns"
    check(changed(composed(), {"env.tool_timeout": 0.5, "env.max_concurrent": 1}))
    for value, sentence in (("long", "is .*expected float"), (0, "must be > 0")):
        with pytest.raises(ConfigError, match=rf"env\.tool_timeout.*{sentence}"):
            check(changed(composed(), {"env.tool_timeout": value}))


def test_environments_of_a_mixture_share_its_system_prompt_and_can_have_their_own_limits():
    envs = {"short": ScriptedEnv(), "long": ScriptedEnv(max_turns=3)}
    env = Mixture(envs=envs, weights={"short": 1.0, "long": 1.0})
    assert (env.max_turns, env.is_multi_turn) == (3, True)
    limits = {"short": {"max_tokens": 4, "stop": ["!"], "rollout_timeout": 9}}
    env.configure(system_prompt="Be brief.", sampling=limits)
    client = ScriptedClient("a long answer")
    for name, tokens in (("short", 4), ("long", 14)):
        player = Player(SAMPLER, env, chat_of(client))
        group = player.play_group(0, Example(0, name, list(HI)), 1)
        (rollout,) = asyncio.run(group)
        assert len(rollout.rows[0].token_ids) - len(client.requests[-1][0]) == tokens
        assert rollout.messages[0] == SYSTEM
    assert [sampling.get("stop") for _, sampling, _, _ in client.requests] == [["!"], None]


def test_two_environments_of_one_class_keep_their_names_and_their_own_examples():
    env = mixture()
    pools = env.pools("train")
    assert [pool.weight for pool in pools] == [2.0, 5.0]
    assert [env.environment_of(pool.examples[0]).name for pool in pools] == ["sums", "large"]
    assert Counter(e.env for e in env.examples("eval")) == {"sums": 7, "large": 7}
    longest = [max((e.messages[0]["content"] for e in p.examples), key=len) for p in pools]
    assert [len(text) for text in longest] == [len("9 + 9 ="), len("99 + 99 =")]
    foreign = type("Mine", (ScriptedEnv,), {"examples": lambda *_: [Example(0, "sums", [])]})()
    with pytest.raises(ValueError, match="examples of the environment 'mine' have env='sums'"):
        Mixture(envs={"mine": foreign}, weights={"mine": 1.0}).pools("train")
    with pytest.raises(ValueError, match="weights has b, but envs has a: set one weight for each"):
        Mixture(envs={"a": sums()}, weights={"b": 1.0})
