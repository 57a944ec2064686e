"""Options of every environment, and mixtures: how often an environment is drawn, and its limits."""

import asyncio
from collections import Counter

import pytest

from envs.arithmetic import Arithmetic
from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from envs.protocol import Environment
from envs.reverse_text import ReverseText
from rl.config.build import build
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.rl.sampling.test_speaker import Driving
from tests.support.composing import changed, composed
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, play, tiny_renderer

SYSTEM = {"role": "system", "content": "Be brief."}


def told(env: Environment, **options) -> Environment:
    env.configure(**options)
    return env


@pytest.mark.parametrize("choice", ["reverse-text", "wiki-search", "math-python", "composed"])
def test_a_system_prompt_opens_every_episode_of_any_environment(choice, tmp_path):
    (tmp_path / "p.txt").write_text("Be brief.\n")
    (tmp_path / "d.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 2)
    path = [f"env.dataset.path={tmp_path / 'd.jsonl'}"] if choice == "composed" else []
    for given in ("Be brief.", str(tmp_path / "p.txt")):
        env = build({**composed(f"env={choice}", *path)["env"], "system_prompt": given})()
        assert env.add_system_prompt([user("hi")]) == [SYSTEM, user("hi")]


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


def test_a_mixture_without_a_system_prompt_does_not_configure_one():
    class Own(ScriptedEnv):
        def configure(self, *, level):  # pyright: ignore[reportIncompatibleMethodOverride]
            self.level = level  # a user's, with options of its own

    env = Mixture(envs={"own": Own()}, weights={"own": 1.0})
    told(env, sampling={"own": {"stop": [*"!?.,"]}})
    assert env.environment_of(Example(0, "own", [])).sampling == {"stop": (*"!?.,",)}


def words(**changes):
    options = {"min_length": 3, "max_length": 4, "num_train": 50, "num_eval": 5}
    return ReverseText(**{**options, "reward_weights": {"exact": 1.0}, **changes})


def sums(max_operand=9):
    options = {"operators": ["+"], "num_train": 30, "num_eval": 7}
    return Arithmetic(max_operand=max_operand, **options, reward_weights={"correct": 2.0})


def mixture():
    envs = {"words": words(), "sums": sums(), "large": sums(99)}
    return Mixture(envs=envs, weights={"words": 1.0, "sums": 2.0, "large": 5.0})


class Lookup(Environment):
    """Three turns with a tool; its examples forget whose they are."""

    max_turns, max_concurrent = 3, 2
    reward_weights = {"found": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, env=None, count=1):
        def find(word: str) -> str:
            """Find."""
            return word

        self.tools, self.env, self.count = [find], env, count

    def examples(self, split):
        return [Example(0, self.env or self.name, [user("?")])] * self.count


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (Environment, {"system_prompt": "none.txt"}, "=none.txt is not a readable file .File"),
        (Environment, {"max_turns": 3}, "max_turns=3, but Environment has no tools and no reply"),
        (mixture, {"worlds": {}}, r"sampling contains \['worlds'\]: choose from words, sums"),
        (mixture, {"sums": {"temperature": 0.5}}, "sums.temperature: one .* own max_tokens, stop,"),
        (mixture, {"sums": {"max_tokens": 0}}, "max_tokens=0: set a whole number, at least 1"),
        (mixture, {"sums": {"max_tokens": 1.5}}, "sums.max_tokens=1.5: set a whole number"),
        (mixture, {"sums": {"rollout_timeout": True}}, "_timeout=True: set a number above 0"),
        (mixture, {"sums": {"stop": "a"}}, "sums.stop=a is not a list"),
        (mixture, {"sums": {"stop": [""]}}, "sums.stop contains an empty text"),
    ],
)
def test_an_impossible_option_is_refused_with_one_sentence(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        told(make(), **({"sampling": options} if make is mixture else options))


@pytest.mark.parametrize(
    ("choice", "changes", "bound"),
    [
        ("reverse-text", {"num_train": 0, "num_eval": 0, "max_concurrent": 0}, ">= 1"),
        ("arithmetic", {"num_train": 0, "num_eval": 0}, ">= 1"),
        ("arithmetic", {"max_operand": -1}, ">= 0"),
        ("alphabet-sort", {"num_names": 0, "names_per_turn": 0, "num_train": 0}, ">= 1"),
        ("alphabet-sort", {"similarity_power": 0, "tool_timeout": 0}, "> 0"),
        ("word-problems", {"questions.num_train": 0, "grader.workers": 0}, ">= 1"),
        ("math-python", {"questions.num_eval": 0, "max_turns": 0, "max_concurrent": 0}, ">= 1"),
        ("math-python", {"sandbox.cpu_seconds": 0, "grader.cpu_seconds": 0}, ">= 1"),
        ("math-python", {"sandbox.memory_mb": 63, "grader.memory_mb": 63}, ">= 64"),
        ("math-python", {"sandbox.max_output_chars": 1}, ">= 2"),
        ("math-python", {"sandbox.call_timeout": 0}, "> 0"),
        ("wiki-search", {"num_eval": 0, "num_results": 0, "max_turns": 0}, ">= 1"),
        ("wiki-search", {"giving_up": 1.5}, "<= 1"),
        ("wiki-search-judged", {"judge.max_concurrent": 0}, ">= 1"),
        ("wiki-search-judged", {"judge.max_score": 0}, "> 0"),
        ("composed", {"max_turns": 0, "max_concurrent": 0}, ">= 1"),
        ("composed", {"dataset.num_eval": -1}, ">= 0"),
        ("agent", {"max_requests": 0}, ">= 1"),
        ("verifiers", {"num_train": 0, "max_concurrent": 0}, ">= 1"),
        ("three-tasks", {"weights.math-python": 0}, "> 0"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_the_check(choice, changes, bound):
    config = composed(f"env={choice}")
    for key, value in changes.items():
        with pytest.raises(ConfigError, match=f"env.{key}={value}, but it must be {bound}"):
            check(changed(config, {f"env.{key}": value}))


def test_turns_and_timeouts_can_be_configured_and_are_checked_like_all_other_options():
    env = told(ScriptedEnv(("a", "b", "c")), max_turns=2, tool_timeout=3.0, max_concurrent=4)
    assert (env.max_turns, env.tool_timeout, env.max_concurrent) == (2, 3.0, 4)
    assert play(env, ScriptedClient("x"))[0].stop_reason == "max_turns"
    check(changed(composed(), {"env.tool_timeout": 3.0}))
    with pytest.raises(ConfigError, match=r"env.tool_timeout is .*expected float"):
        check(changed(composed(), {"env.tool_timeout": "long"}))
    with pytest.raises(ConfigError, match=r"env.tool_timout is not a key .* mean tool_timeo"):
        check(changed(composed(), {"env.tool_timout": 3.0}))


def test_an_environment_of_a_mixture_can_have_its_own_limits():
    env = Mixture(
        envs={"short": ScriptedEnv(), "long": ScriptedEnv()}, weights={"short": 1.0, "long": 1.0}
    )
    env.configure(sampling={"short": {"max_tokens": 4, "stop": ["!"], "rollout_timeout": 9}})
    client = ScriptedClient("a long answer")
    chat = RendererChat(SAMPLER, tiny_renderer(), client, 256, LiveVersion(7))
    for name, tokens in (("short", 4), ("long", 14)):
        group = Player(SAMPLER, env, chat).play_group(0, Example(0, name, list(HI)), 1)
        (rollout,) = asyncio.run(group)
        assert len(rollout.rows[0].token_ids) - len(client.requests[-1][0]) == tokens
    assert [sampling.get("stop") for _, sampling, _, _ in client.requests] == [["!"], None]


def test_two_environments_of_one_class_keep_their_names_and_their_own_examples():
    env = mixture()
    pools = env.pools("train")
    assert [pool.weight for pool in pools] == [1.0, 2.0, 5.0]
    assert [pool.examples[0].env for pool in pools] == ["words", "sums", "large"]
    assert all(env.environment_of(p.examples[0]).name == p.examples[0].env for p in pools)
    assert Counter(e.env for e in env.examples("eval")) == {"words": 5, "sums": 7, "large": 7}
    longest = [max((e.messages[0]["content"] for e in p.examples), key=len) for p in pools[1:]]
    assert [len(text) for text in longest] == [len("9 + 9 ="), len("99 + 99 =")]


def test_each_environment_keeps_its_own_turns_tools_and_concurrency():
    env = Mixture(envs={"words": words(), "find": Lookup()}, weights={"words": 1, "find": 1})
    assert (env.max_turns, env.is_multi_turn) == (3, True)
    one, other = (env.environment_of(pool.examples[0]) for pool in env.pools("train"))
    assert (one.max_turns, one.tool_specs, one.max_concurrent) == (1, None, None)
    assert (other.max_turns, other.max_concurrent) == (3, 2)
    assert [spec["name"] for spec in other.tool_specs] == ["find"]


@pytest.mark.parametrize(
    ("envs", "weights", "message"),
    [
        ({}, {}, "envs is empty"),
        ({"a": words()}, {"b": 1.0}, "weights has b, but envs has a: set one weight for each"),
        ({"a": mixture()}, {"a": 1.0}, r"another mixture \(envs\.a\)"),
        ({"a": Lookup("b")}, {"a": 1.0}, "examples of the environment 'a' have env='b'"),
        ({"a": Lookup(count=0)}, {"a": 1.0}, r"envs\.a has no eval examples"),
    ],
)
def test_environments_and_weights_that_cannot_be_mixed_are_refused(envs, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(envs=envs, weights=weights).pools("eval")
