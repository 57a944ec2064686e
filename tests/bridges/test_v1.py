"""Both directions of the API v1, with a stand-in for the library, which is not installed.

The stand-in calls our code as verifiers 0.4 does. The *_cases.py files use the real library.
"""

import importlib
import math
import os
import sys
from collections import namedtuple
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace

import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant, user
from envs.protocol import ContextFull, Environment, PolicyTurn
from offbyone.episodes import PlayedEpisode
from tests.support.answers import Answers, completion
from tests.support.bridges.serving import ScriptedEndpoint, use_the_adder

OURS = ("offbyone.v1", "envs.verifiers.v1")
BASES = ("TasksetConfig", "State", "Task", "TaskData", "TaskConfig", "Trace", "Runtime", "Agents")
BASES += ("ModelContext", "Taskset", "Harness", "HarnessConfig", "EnvConfig", "AgentConfig", "Env")
BASES += ("SingleAgentEnv", "EvalClientConfig", "SubprocessConfig")
ProgramResult = namedtuple("ProgramResult", "exit_code stdout stderr")


class Base:
    def __init__(self, *given, **options):
        self.given = given
        vars(self).update(options)

    def __class_getitem__(cls, _):
        return cls

    async def score(self, trace, runtime=None):
        trace.scored_by_the_library = True


DECLARED = {
    "writer": SimpleNamespace(harness=None, runtime=SimpleNamespace(type="prime")),
    "rival": SimpleNamespace(
        harness=SimpleNamespace(id="own", env={"C": "d"}), runtime=SimpleNamespace(type="prime")
    ),
}


@pytest.fixture
def library(monkeypatch):
    """Install the stand-in, and return a function that imports a module of ours."""
    names = ("", ".v1", ".v1.runtimes", ".v1.configs", ".v1.configs.agent", ".v1.utils")
    modules = {f"verifiers{name}": ModuleType(f"verifiers{name}") for name in names}
    vf, agent = modules["verifiers.v1"], modules["verifiers.v1.configs.agent"]
    vars(vf).update({name: type(name, (Base,), {}) for name in BASES})
    vars(modules["verifiers.v1.runtimes"]).update(
        ProgramResult=ProgramResult, SubprocessConfig=vf.SubprocessConfig
    )
    modules["verifiers"].v1 = vf
    agent.agent_config_fields = lambda config: DECLARED
    vf.loaders = modules["verifiers.v1.utils"].loaders = SimpleNamespace(
        env_config_type=lambda name, id: dict,
        default_harness_id=lambda name: "bash" if name == "plain" else "own",
        harness_class=lambda id: SimpleNamespace(EXECUTES_CODE=id == "bash"),
        resolve_env_config=lambda config: config,
    )
    importlib.import_module("offbyone")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module
    for name in OURS:
        sys.modules.pop(name, None)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Adding(Environment):
    name, max_turns, tools = "adding", 3, (add,)
    reward_weights = {"right": 2.0}  # noqa: RUF012 as environments write it
    closed = ()

    async def score(self, episode):
        return {"right": [0.0] * (episode.turns - 1) + [float(episode.text == "5")], "turns": 2.5}

    def close(self, episode):
        self.closed += (episode,)


def trace_of(env):
    recorded = []
    return SimpleNamespace(
        state=SimpleNamespace(played=PlayedEpisode(env, Example(0, env.name, [user("2 and 3?")]))),
        recorded=recorded,
        record_reward=lambda *given: recorded.append(given),
        record_metric=lambda *given: recorded.append(given),
    )


async def launch(library, server, trace):
    harness, context = library("offbyone.v1").ExportedHarness(), SimpleNamespace(model="m")
    with server.listening() as endpoint:
        return await harness.launch(context, trace, None, endpoint.url, "secret", {}, None)


async def test_the_harness_plays_an_episode_and_the_task_records_its_rewards(library):
    env, server = Adding(), ScriptedEndpoint(use_the_adder)
    trace = trace_of(env)
    assert await launch(library, server, trace) == (0, "", "")
    first, second = server.bodies
    assert (first["model"], first["messages"]) == ("m", [user("2 and 3?")])
    assert first["tools"] == [{"type": "function", "function": env.tool_specs[0]}]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert trace.state.played.episode.stop_reason == StopReason.STOP

    ours = library("offbyone.v1")
    task = ours.ExportedTask()
    task.played_by, task.scoring_deferred = env, True
    await task.score(trace)
    assert (trace.scored_by_the_library, trace.recorded) == (True, [])
    task.scoring_deferred = False
    await task.score(trace)
    assert trace.recorded == [("right", 1.0, 2.0), ("turns", 2.5)]
    await ours.ExportedHarness().cleanup(trace, None)
    assert env.closed == (trace.state.played.episode,)
    await ours.ExportedHarness().cleanup(SimpleNamespace(state=SimpleNamespace(played=None)), None)


@pytest.mark.parametrize(
    ("answer", "result", "reason"),
    [
        ((400, "maximum context length"), (0, "", ""), StopReason.CONTEXT),
        ((500, "oh no"), (1, "", "oh no"), None),
        ((200, completion(None)), (0, "", ""), StopReason.STOP),
        ((200, completion("5")), (0, "", ""), StopReason.MAX_TOKENS),
    ],
)
async def test_an_episode_ends_with_its_last_turn_or_an_error(library, answer, result, reason):
    if reason == StopReason.MAX_TOKENS:
        answer[1]["choices"][0]["finish_reason"] = "length"
    trace = trace_of(type("Plain", (Adding,), {"tools": ()})())
    server = Answers(answer)
    assert await launch(library, server, trace) == result
    assert "tools" not in server.bodies[0]
    episode = trace.state.played.episode
    assert (episode.stop_reason, episode.turns) == (reason, int(answer[0] == 200))
    if episode.turns:
        assert episode.messages[-1] == assistant(
            answer[1]["choices"][0]["message"]["content"] or ""
        )


async def test_the_tasks_are_the_examples_of_a_split(library):
    ours = library("offbyone.v1")
    assert (ours.ExportedConfig.env, ours.ExportedConfig.split) == ("reverse-text", "eval")
    taskset = ours.ExportedTaskset()
    options = {"num_eval": 3, "num_train": 2, "system_prompt": "Brief."}
    for split, count in (("eval", 3), ("train", 2)):
        taskset.config = SimpleNamespace(env="reverse-text", options=options, split=split, task="t")
        tasks = list(taskset.load())
        assert len(tasks) == count
        data, config = tasks[1].given
        assert (data.id, config) == ("reverse-text-1", "t")
        assert data.prompt == [{"role": "system", "content": "Brief."}, *tasks[1].example.messages]
        trace = SimpleNamespace(state=SimpleNamespace())
        await tasks[1].setup(trace)
        assert trace.state.played.episode.example == tasks[1].example


LOCAL = {"PYTHONPATH": ""}
CHANGED = {"harness": {"id": "null", "env": {"A": "b"}}, "runtime": {"type": "docker"}, "n": 1}


@pytest.mark.parametrize(
    ("name", "args", "writer", "rival"),
    [
        # Without a choice, the agent gets a harness without a shell, in a process of this machine.
        ("plain", {}, ("null", LOCAL, "subprocess"), ("own", LOCAL | {"C": "d"}, "subprocess")),
        ("x", {}, ("own", LOCAL, "subprocess"), ("own", LOCAL | {"C": "d"}, "subprocess")),
        # The library runs a shell in a container by default, which has its own PYTHONPATH.
        (
            "plain",
            {"writer": {"harness": {"id": "bash"}}, "rival": CHANGED},
            ("bash", {}, None),
            ("null", {"A": "b"}, "docker"),
        ),
        (
            "plain",
            {"writer": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}},
            ("bash", LOCAL, "subprocess"),
            ("own", LOCAL | {"C": "d"}, "subprocess"),
        ),
        (
            "plain",
            {"rival": {"harness": {"env": {"PYTHONPATH": "mine", "C": "e"}}}},
            ("null", LOCAL, "subprocess"),
            ("own", {"PYTHONPATH": "mine", "C": "e"}, "subprocess"),
        ),
    ],
)
def test_the_harness_and_the_runtime_of_each_agent(library, name, args, writer, rival):
    config = library("envs.verifiers.v1").env_config(name, {"taskset": {"size": 3}, **args})
    assert config["taskset"] == {"size": 3, "id": name}
    for role, expected in (("writer", writer), ("rival", rival)):
        agent = config[role]
        runtime = agent.get("runtime", {}).get("type")
        assert (agent["harness"]["id"], agent["harness"]["env"], runtime) == expected
    assert config["rival"].get("n") == args.get("rival", {}).get("n")


def score(value):
    return SimpleNamespace(score=value)


def trace(id, name="agent", *, stop=None, trainable=True, **values):
    options = {"rewards": {"right": score(0.5), "none": None}, "reward": 1.5, "errors": []}
    options |= {"metrics": {"turns": 2.0, "none": None}, **values}
    agent = SimpleNamespace(name=name, trainable=trainable)
    return SimpleNamespace(id=id, agent=agent, stop_condition=stop, **options)


class Theirs:
    """An environment of the library, whose episodes have these traces."""

    bounded = True

    def __init__(self, *traces, ok=True, errors=()):
        self.episode = SimpleNamespace(ok=ok, errors=list(errors), traces=[*traces])
        self.taskset, self.heard = self, []

    def __iter__(self):
        return iter(self.take(5))

    def take(self, count):
        def right():
            """A reward of the task."""

        right._vf_weight = 2
        unweighted = lambda: None  # noqa: E731
        unweighted._vf_weight = 0.0
        judge = SimpleNamespace(reward_name="judge", config=SimpleNamespace(weight=0.5))
        return [
            SimpleNamespace(
                data=SimpleNamespace(system_prompt="be brief", prompt=f"q{number}"),
                hooks=lambda kind: [right, unweighted] if kind == "reward" else [],
                plugged_judges=lambda: [judge],
            )
            for number in range(count)
        ]

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context, on_trace):
        self.context, self.task = context, task
        for one in self.episode.traces:
            on_trace(one)
            with_key = self.endpoint.get_turn_by_key[one.id]
            try:
                self.heard.append(await with_key([user(one.id)], None))
            except ContextFull:
                self.heard.append("full")
        self.episode.traces = [one for one in self.episode.traces if one.id != "retried"]
        return self.episode


@pytest.fixture
def adapter(library):
    def make(env, alone=False):
        ours, vf = library("envs.verifiers.v1"), sys.modules["verifiers.v1"]
        vf.loaders.load_environment = lambda config: env
        env.__class__ = type("Alone", (Theirs, vf.SingleAgentEnv), {}) if alone else Theirs
        made = ours.TasksetAdapter("plain", {})
        env.endpoint = made._endpoint
        return made

    return make


def test_the_rows_and_the_weights_of_a_taskset(adapter):
    made = adapter(env := Theirs())
    assert made.max_concurrent == 4 * len(os.sched_getaffinity(0))
    assert made.rows("eval", 3) is None
    assert [len(made.rows("train", limit)) for limit in (None, 3)] == [5, 3]
    row = made.rows("train", 2)[1]
    assert row.messages == [{"role": "system", "content": "be brief"}, user("q1")]
    assert row.data.data.prompt == "q1"
    assert made.reward_weights == {"right": 2.0, "judge": 0.5}
    env.bounded = False
    assert len(made.rows("train", 2)) == 2
    with pytest.raises(ValueError, match=r"the taskset has no end: set env\.num_train"):
        made.rows("train", None)


async def play(made, full=()):
    async def speak(messages, tools, *, role):
        if messages[0]["content"] in full:
            raise ContextFull
        return PolicyTurn(assistant(role), False, 1, 1)

    return await made.play(made.rows("train", 1)[0], speak)


async def test_each_run_of_an_agent_is_a_role_with_its_own_outcome(adapter):
    runs = (("1", "writer"), ("2", "rival"), ("3", "writer"), ("retried", "writer"))
    traces = [trace(*run) for run in runs]
    traces[1].stop_condition, traces[2].stop_condition = "max_turns", "agent_timeout"
    traces.append(trace("5", "judge", trainable=False))
    env = Theirs(*traces)
    found = await play(adapter(env))
    assert [turn.message["content"] for turn in env.heard] == [*found]
    assert [*found] == ["writer", "rival", "writer-2", "writer-3", "judge"]
    reasons = [None, StopReason.MAX_TURNS, StopReason.TIMEOUT, None, None]
    assert [one.stop_reason for one in found.values()] == reasons
    assert (found["rival"].reward, found["rival"].rewards) == (1.5, {"turns": 2.0, "right": 0.5})
    assert [math.isnan(one.reward) for one in found.values()] == [False] * 3 + [True] * 2
    assert env.endpoint.get_turn_by_key == {}
    assert env.context.model == "policy"
    assert env.context.client.base_url.startswith("http://127.0.0.1:")


async def test_the_only_agent_has_no_role_and_a_full_context_is_no_error(adapter):
    problem = SimpleNamespace(type="KeyError", message="the judge is broken")
    env = Theirs(trace("1"), ok=False, errors=[problem])
    assert list(await play(adapter(env, alone=True), full=["1"])) == [""]
    with pytest.raises(RuntimeError, match="environment failed: KeyError: the judge is broken"):
        await play(adapter(env, alone=True))
    late = SimpleNamespace(type="OSError", message="late")
    env = Theirs(trace("1", errors=[late]), ok=False, errors=[problem])
    with pytest.raises(RuntimeError, match="environment failed: OSError: late"):
        await play(adapter(env))
