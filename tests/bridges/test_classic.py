"""Both directions of the classic API, with a stand-in for the library, which is not installed.

The stand-in calls our code as verifiers 0.1.14 does. The *_cases.py files use the real library.
"""

import importlib
import json
import math
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant, tool_call, user
from envs.protocol import ContextFull, Environment, PolicyTurn

OURS = ("offbyone.classic", "envs.verifiers.classic")


class Options:
    def __init__(self, *args, **options):
        self.args = args
        vars(self).update(options)


class Rows(list):
    """The methods of a data set that we call."""

    from_list = classmethod(lambda cls, rows: cls(rows))

    def select(self, numbers):
        return Rows(self[number] for number in numbers)

    def to_list(self):
        return list(self)


@pytest.fixture
def library(monkeypatch):
    """Install the stand-in, and return a function that imports a module of ours."""
    names = ("verifiers", "verifiers.clients", "verifiers.utils.message_utils", "datasets")
    modules = {name: ModuleType(name) for name in (*names, "verifiers.utils")}
    modules["datasets"].Dataset = Rows
    modules["verifiers.clients"].OpenAIChatCompletionsClient = type(
        "Client", (), {"__init__": lambda self, client: vars(self).update(client=client)}
    )
    modules["verifiers.utils.message_utils"].normalize_messages = list
    vf = modules["verifiers"]
    vf.State, vf.Messages, vf.MultiTurnEnv, vf.Rubric = dict, list, Options, object
    vf.Error = type("Error", (Exception,), {})
    vf.OverlongPromptError = type("OverlongPromptError", (vf.Error,), {})
    vf.cleanup = lambda method: method
    importlib.import_module("offbyone")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module
    for name in OURS:
        sys.modules.pop(name, None)


def theirs(text, role="assistant", **more):
    return SimpleNamespace(role=role, content=text, **more)


async def rollout(made, row, *texts, replies=9, cut_off=False, **given):
    """Return the state of a rollout; a limit of the library ends it after `replies` replies."""
    state = {"info": json.loads(row["info"]), "trajectory": [], "error": None, **given}
    await made.setup_state(state)
    for number, text in enumerate(texts):
        last = number == len(texts) - 1
        step = {"completion": [theirs(text)], "is_truncated": cut_off and last}
        state["trajectory"].append(step)
        if number < replies:
            step["reply"] = await made.env_response([], state)
    await made.rubric.score_rollout(state)
    return state


OPTIONS = {"min_turns": 2, "max_turns": 2, "num_train": 3, "num_eval": 2, "similarity_power": 1.0}
OPTIONS |= {"reward_weights": {"exact": 0.5, "similarity": 2.0}, "system_prompt": "Be brief."}


@pytest.fixture
def exported(library):
    return library("offbyone.classic").load_environment("alphabet-sort", **OPTIONS)


def answers_of(row):
    """Return the right answers, given that the second turn adds nothing that we know."""
    return " ".join(sorted(row["prompt"][-1]["content"].removeprefix("sort: ").split()))


async def test_the_two_data_sets_have_the_prompts_and_name_their_examples(exported):
    train, held_out = exported.dataset(), exported.eval_dataset()
    assert (len(train), len(held_out), exported.max_turns, exported.tool_defs) == (3, 2, -1, None)
    for split, rows in (("train", train), ("eval", held_out)):
        system, question = rows[1]["prompt"]
        assert system == {"role": "system", "content": "Be brief."}
        assert question["content"].startswith("sort: ")
        assert json.loads(rows[1]["info"]) == {"split": split, "id": 1, "env": "alphabet-sort"}
    state = await rollout(exported, train[2], "x")
    assert state["offbyone_episode"].episode.messages[1] == train[2]["prompt"][1]


async def test_a_rollout_is_replied_to_and_scored_by_our_environment(exported):
    row = exported.eval_dataset()[1]
    state = await rollout(exported, row, answers_of(row), "nothing")
    first, last = (step["reply"] for step in state["trajectory"])
    assert first[0]["content"].startswith("add: ")
    assert (last, state["final_env_response"]) == ([], [])
    assert state["metrics"] == {"exact": 0.5, "similarity": 0.5}
    assert state["reward"] == 0.5 * 0.5 + 2.0 * 0.5
    episode = state["offbyone_episode"].episode
    assert (episode.turns, episode.stop_reason) == (2, StopReason.STOP)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, StopReason.STOP),
        ({"timed_out": True, "prompt_too_long": True}, StopReason.TIMEOUT),
        ({"prompt_too_long": True}, StopReason.CONTEXT),
    ],
)
async def test_a_rollout_that_a_limit_of_the_library_ended_is_scored(exported, given, reason):
    """The library's limit of tokens ends a rollout before `env_response` has the last turn."""
    row = exported.eval_dataset()[0]
    state = await rollout(exported, row, answers_of(row), replies=0, **given)
    assert (state["error"], state["reward"]) == (None, 0.5 * 0.5 + 2.0 * 0.5)
    episode = state["offbyone_episode"].episode
    assert (episode.turns, episode.stop_reason, len(episode.messages)) == (1, reason, 3)
    # The time ended while the policy wrote its second turn, so nothing is added.
    state = await rollout(exported, row, answers_of(row), timed_out=True)
    assert state["offbyone_episode"].episode.stop_reason == StopReason.TIMEOUT
    assert state["offbyone_episode"].episode.turns == 1


async def test_a_turn_that_was_cut_off_ends_the_rollout(exported):
    row = exported.eval_dataset()[0]
    state = await rollout(exported, row, answers_of(row), cut_off=True)
    assert (state["final_env_response"], state["reward"]) == ([], 1.25)
    assert state["offbyone_episode"].episode.stop_reason == StopReason.MAX_TOKENS


async def test_the_advantage_of_a_group_is_the_distance_to_its_mean(exported):
    row = exported.eval_dataset()[0]
    states = [await rollout(exported, row, text) for text in (answers_of(row), "no", "no", "no")]
    await exported.rubric.score_group(states)
    # The rewards are 1.25, 0, 0 and 0.
    assert [state["advantage"] for state in states] == [0.9375, *[-0.3125] * 3]


class Failing(Environment):
    reward_weights = {"good": 2.0}  # noqa: RUF012 as environments write it
    closed = ()

    def examples(self, split):
        return [Example(0, self.name, [user("?")])]

    async def reply(self, episode, message):
        if message["content"] == "no reply":
            raise KeyError("reply")

    async def score(self, episode):
        return {"good": math.nan if episode.text == "nan" else 1.0, "seen": 3.0}

    def close(self, episode):
        self.closed += (episode,)


async def test_errors_of_our_environment_are_errors_of_the_library(library, monkeypatch):
    ours = library("offbyone.classic")
    env = Failing()
    made = ours.ExportedEnvironment(env)
    (row,) = made.dataset()
    with pytest.raises(sys.modules["verifiers"].Error, match=r"Failing\.reply: 'reply'"):
        await rollout(made, row, "no reply")
    state = await rollout(made, row, "nan")
    assert "Failing.score: score returned NaN" in str(state["error"])
    assert (state["reward"], state["metrics"]) == (0.0, {})
    state = await rollout(made, row, "yes", error=ValueError("the endpoint is down"))
    assert (str(state["error"]), state["reward"]) == ("the endpoint is down", 0.0)
    state = await rollout(made, row, "yes")
    assert (state["reward"], state["metrics"]) == (2.0, {"good": 1.0, "seen": 3.0})
    await made.rubric.release({})
    await made.rubric.release(state)
    assert env.closed == (state["offbyone_episode"].episode,)


class Theirs:
    """An environment of the library, with three rewards."""

    requires_group_rollouts, max_turns = False, 3
    rubric = SimpleNamespace(
        _get_reward_func_names=lambda: ["right", "length", "seen"],
        _get_reward_weights=lambda: [1, 0.5, 0.0],
    )

    def __init__(self, **outcome):
        self.outcome = {"error": None, "stop_condition": None, "is_truncated": False}
        self.outcome |= {"reward": 1, "metrics": {"right": 1, "seen": 7}, **outcome}

    def build_dataset(self):
        return Rows({"prompt": f"q{number}", "n": number} for number in range(5))

    def build_eval_dataset(self):
        return Rows([{"prompt": [{"role": "user", "content": "e", "name": None}]}])

    async def run_group(self, rows, client, model, sampling):
        self.ran = rows, model, sampling
        prompt, _ = await client.to_native_prompt([theirs("hi", "user")])
        self.answer = await client.get_native_response(prompt, model, {}, self.tools)
        return [self.outcome]

    tools = ({"type": "function", "function": {"name": "add"}},)


@pytest.fixture
def adapter(library):
    def make(env, **args):
        def load_environment(name, **given):
            assert (name, given) == ("their_env", args)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return env

        ours = library("envs.verifiers.classic")
        sys.modules["verifiers"].load_environment = load_environment
        return ours.ClassicAdapter("their_env", args)

    return make


def test_rows_weights_and_signal_handlers_of_an_environment_of_the_library(adapter):
    before = signal.getsignal(signal.SIGTERM)
    made = adapter(Theirs(), size=3)
    assert signal.getsignal(signal.SIGTERM) == before
    assert made.reward_weights == {"right": 1.0, "length": 0.5}
    assert [row.data["n"] for row in made.rows("train", 2)] == [0, 1]
    assert [len(made.rows("train", limit)) for limit in (None, 5, 9)] == [5, 5, 5]
    assert made.rows("train", 1)[0].messages == [user("q0")]
    assert made.rows("eval", 1)[0].messages == [user("e")]
    without = Theirs()
    without.build_eval_dataset = lambda: None
    assert adapter(without).rows("eval", 1) is None
    without.requires_group_rollouts = True
    with pytest.raises(ValueError, match="their_env has rewards that compare the rollouts of a gr"):
        adapter(without)


@pytest.mark.parametrize(
    ("outcome", "max_turns", "reason"),
    [
        ({}, 3, None),
        ({"stop_condition": "timeout_reached", "is_truncated": True}, 1, StopReason.TIMEOUT),
        ({"stop_condition": "max_turns_reached"}, 3, StopReason.MAX_TURNS),
        # The reason of the last turn says more.
        ({"stop_condition": "max_turns_reached"}, 1, None),
        ({"stop_condition": "max_turns_reached", "is_truncated": True}, 3, None),
    ],
)
async def test_the_policy_takes_the_turns_of_the_library(adapter, outcome, max_turns, reason):
    env, heard = Theirs(**outcome), []
    env.max_turns = max_turns

    async def speak(messages, tools):
        heard.append((messages, tools))
        return PolicyTurn(tool_call("add", "c1", "so", a=1), False, 3, 4)

    made = adapter(env)
    (row,) = made.rows("train", 1)
    played = await made.play(row, speak)
    assert heard == [([user("hi")], [{"name": "add"}])]
    assert env.ran == ([row.data], "policy", {})
    (choice,) = env.answer.choices
    assert (choice.message.content, choice.finish_reason) == ("so", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert list(played) == [""]
    found = played[""]
    assert (found.reward, found.rewards) == (1.0, {"right": 1.0, "seen": 7.0})
    assert found.stop_reason == reason


async def test_a_full_context_and_an_error_of_the_library(adapter):
    async def speak(messages, tools):
        assert tools is None
        raise ContextFull("no room")

    env = Theirs()
    env.tools = ()
    made = adapter(env)
    with pytest.raises(sys.modules["verifiers"].OverlongPromptError, match="no room"):
        await made.play(made.rows("train", 1)[0], speak)

    async def answer(messages, tools):
        return PolicyTurn(assistant("x"), False, 1, 1)

    made = adapter(Theirs(error="the game is broken"))
    with pytest.raises(RuntimeError, match="the rollout ended in an error: 'the game is broken'"):
        await made.play(made.rows("train", 1)[0], answer)


def test_a_message_of_the_library_is_a_plain_dict(library):
    plain_message = library("envs.verifiers.classic").plain_message
    call = SimpleNamespace(name="add", arguments='{"a": 1}', id="c1")
    part = SimpleNamespace(model_dump=lambda: {"type": "text", "text": "b"})
    assert plain_message(theirs([{"type": "text", "text": "a"}, part], "user")) == user("ab")
    assert plain_message(theirs("3", "tool", tool_call_id="c1")) == {
        **{"role": "tool", "content": "3", "tool_call_id": "c1"}
    }
    assert plain_message(theirs(None, tool_calls=[call], reasoning_content="hm")) == {
        **{"role": "assistant", "content": "", "reasoning_content": "hm"},
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    }
