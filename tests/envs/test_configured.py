"""Options of every environment: system prompt, turns, tool timeout, episodes at once."""

import asyncio

import pytest

from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from envs.options import parse_limits
from envs.protocol import Environment
from rl.config.build import build
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.envs.test_mixture import make
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
        config = composed(f"env={choice}", *path)
        env = build({**config["env"], "system_prompt": given})()
        assert env.add_system_prompt([user("hi")]) == [SYSTEM, user("hi")]


def test_the_policy_reads_the_system_prompt_and_the_rollout_records_it():
    client = ScriptedClient("x")
    (rollout,) = play(told(ScriptedEnv(), system_prompt="Be brief."), client)
    prompt = bytes(t for t in client.requests[0][0] if t < 256).decode()
    assert prompt.startswith("system\nBe brief.")
    assert rollout.messages[0] == SYSTEM


def test_a_system_prompt_replaces_the_environments_own_and_an_empty_one_removes_it(
    tmp_path, monkeypatch
):
    own = [{"role": "system", "content": "Talk."}, user("hi")]
    brief = told(ScriptedEnv(), system_prompt="Be brief.")
    assert brief.add_system_prompt(own) == [SYSTEM, user("hi")]
    assert told(ScriptedEnv(), system_prompt="").add_system_prompt(own) == [user("hi")]
    assert ScriptedEnv().add_system_prompt(own) == own
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.md").write_text("Be brief.\n")
    for given, text in (("~/p.md", "Be brief."), (" Read\nthis.txt", "Read\nthis.txt")):
        assert told(ScriptedEnv(), system_prompt=given).system_prompt == text


def test_an_environment_that_holds_the_conversation_keeps_the_system_prompt_in_every_turn():
    client = ScriptedClient("x")
    (rollout,) = play(told(Driving("more", "again"), system_prompt="Be brief."), client)
    assert len(rollout.rows) == 1
    assert rollout.messages[0] == SYSTEM
    assert all(bytes(t for t in r[0] if t < 256).startswith(b"system") for r in client.requests)


def test_a_hint_is_added_below_the_question_and_not_below_the_system_prompt():
    env = told(ScriptedEnv(), system_prompt="Be brief.")
    example = Example(0, env.name, [user("hi")], {"hint": "Say good."})
    opening = env.add_system_prompt(example.messages)
    assert env.teacher_messages(example, opening) == [SYSTEM, user("hi\n\nSay good.")]


def test_a_mixture_without_a_system_prompt_does_not_configure_one():
    class Own(ScriptedEnv):
        def configure(self, *, level):  # pyright: ignore[reportIncompatibleMethodOverride]
            self.level = level  # a user's, with options of its own

    env = told(
        Mixture(envs={"own": Own()}, weights={"own": 1.0}), sampling={"own": {"stop": [*"!?.,"]}}
    )
    assert env.environment_of(Example(0, "own", [])).sampling == {"stop": (*"!?.,",)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"system_prompt": "none.txt"}, "system_prompt=none.txt is not a readable file .File"),
        ({"max_concurrent": 0}, "max_concurrent=0: set it to at least 1"),
        ({"tool_timeout": 0.0}, "tool_timeout=0: set it to more than 0 seconds"),
        ({"max_turns": 3}, "max_turns=3, but Alone has no tools and no reply"),
    ],
)
def test_an_impossible_value_is_refused_with_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        told(type("Alone", (Environment,), {})(), **options)


def test_turns_and_timeouts_can_be_configured():
    env = told(ScriptedEnv(("a", "b", "c")), max_turns=2, tool_timeout=3.0, max_concurrent=4)
    assert (env.max_turns, env.tool_timeout, env.max_concurrent) == (2, 3.0, 4)
    assert play(env, ScriptedClient("x"))[0].stop_reason == "max_turns"


def test_common_options_are_checked_like_all_others():
    check(changed(composed(), {"env.tool_timeout": 3.0}))
    with pytest.raises(ConfigError, match=r"env.tool_timeout is .*expected float"):
        check(changed(composed(), {"env.tool_timeout": "long"}))
    with pytest.raises(
        ConfigError, match=r"env.tool_timout is not a key .* did you mean tool_timeo"
    ):
        check(changed(composed(), {"env.tool_timout": 3.0}))


def test_an_environment_of_a_mixture_can_have_its_own_limits():
    scripted = {name: ScriptedEnv() for name in ("short", "long")}
    mixture = Mixture(envs=scripted, weights={"short": 1.0, "long": 1.0})
    mixture.configure(sampling={"short": {"max_tokens": 4, "stop": ["!"], "rollout_timeout": 9}})
    client = ScriptedClient("a long answer")
    chat = RendererChat(SAMPLER, tiny_renderer(), client, 256, LiveVersion(7))
    for name, tokens in (("short", 4), ("long", 14)):
        group = Player(SAMPLER, mixture, chat).play_group(0, Example(0, name, list(HI)), 1)
        (rollout,) = asyncio.run(group)
        assert len(rollout.rows[0].token_ids) - len(client.requests[-1][0]) == tokens
    assert [sampling.get("stop") for _, sampling, _, _ in client.requests] == [["!"], None]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"temperature": 0.5},
            "x.temperature: one environment may have its own max_tokens, stop, ",
        ),
        ({"max_tokens": 0}, "x.max_tokens=0: set a whole number, at least 1"),
        ({"max_tokens": 1.5}, "x.max_tokens=1.5: set a whole number"),
        ({"rollout_timeout": True}, "x.rollout_timeout=True: set a number above 0"),
        ({"stop": "a"}, "x.stop=a is not a list"),
        ({"stop": [""]}, "x.stop contains an empty text"),
    ],
)
def test_an_option_that_environments_must_share_is_refused_with_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_limits(given, "x")


def test_limits_of_an_unknown_environment_are_refused_with_one_sentence():
    with pytest.raises(
        ValueError, match=r"sampling contains \['worlds'\]: choose from words, sums"
    ):
        make().configure(sampling={"worlds": {}})
