"""The adapter for tasksets of `verifiers.v1`, which are played by a harness (an agent program).

The harness, often a separate process, asks the endpoint in envs/policy_endpoint.py for every
turn. Each request contains the id of a trace, the library's record of one run of an agent. An
environment may run several agents, or one agent several times. Each run is a role of the policy.
"""

# pyright: reportAttributeAccessIssue=false
# Needed because pyright mistakes this folder, `verifiers`, for the library.

import asyncio
import math
import os
from collections import Counter
from functools import partial
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import (  # pyright: ignore[reportMissingImports]
    agent_config_fields,
)
from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

from envs.episode import Split, StopReason
from envs.messages import Message, user
from envs.policy_endpoint import MODEL, PolicyEndpoint
from envs.protocol import ContextFull, PolicyTurn, Speak
from envs.verifiers.adapter import Outcome, Row

_EPISODES_PER_CORE = 4
_STOPS = {"max_turns": StopReason.MAX_TURNS, "agent_timeout": StopReason.TIMEOUT}


class TasksetAdapter:
    def __init__(self, name: str, args: dict[str, Any]) -> None:
        """Load the environment. `args`: keys of the `env` table in the library's TOML files."""
        self._env = loaders.load_environment(env_config(name, args))
        # Harnesses and tool servers may be processes. 30 processes need minutes to start on two
        # cores, but they mostly wait for the policy, so each core gets several episodes.
        self.max_concurrent: int | None = _EPISODES_PER_CORE * len(os.sched_getaffinity(0))
        self._endpoint = PolicyEndpoint()
        self._context: asyncio.Future[vf.ModelContext] | None = None
        self.reward_weights: dict[str, float] = {}

    def rows(self, split: Split, limit: int | None) -> list[Row] | None:
        """Return the tasks as rows; None for eval, because a taskset has no splits."""
        if split == "eval":
            return None
        taskset = self._env.taskset
        if limit is None and not taskset.bounded:
            raise ValueError("the taskset has no end: set env.num_train to a number of tasks")
        tasks = list(taskset if limit is None else taskset.take(limit))
        if tasks:
            self.reward_weights |= _reward_weights(tasks[0])
        return [Row(_first_messages(task.data), task) for task in tasks]

    async def play(self, row: Row, speak: Speak) -> dict[str, Outcome]:
        roles: dict[str, str] = {}  # id of a trace -> role
        runs = Counter[str]()  # name of an agent -> how often the agent ran
        full = False

        async def get_turn(
            messages: list[Message], tools: list[dict[str, Any]] | None, **options: Any
        ) -> PolicyTurn:
            nonlocal full
            try:
                return await speak(messages, tools, **options)
            except ContextFull:
                full = True
                raise

        def register_session(trace: vf.Trace) -> None:
            name = trace.agent.name
            runs[name] += 1
            role = name if runs[name] == 1 else f"{name}-{runs[name]}"
            roles[trace.id] = "" if isinstance(self._env, vf.SingleAgentEnv) else role
            self._endpoint.get_turn_by_key[trace.id] = partial(get_turn, role=roles[trace.id])

        context = await self._model_context()
        try:
            episode = await self._env.run_episode(row.data, context, on_trace=register_session)
        finally:
            for trace_id in roles:
                del self._endpoint.get_turn_by_key[trace_id]
        return _make_outcomes(episode, roles, full)

    async def _model_context(self) -> vf.ModelContext:
        if self._context is None:
            self._context = asyncio.get_running_loop().create_future()
            # Keep a reference to this asyncio task, because the event loop has only a weak one.
            self._task = asyncio.create_task(self._run_servers(self._context))
        # Without the shield, a cancelled episode would cancel the servers' start for all episodes.
        return await asyncio.shield(self._context)

    async def _run_servers(self, ready: "asyncio.Future[vf.ModelContext]") -> None:
        try:
            async with self._endpoint.serving() as url, self._env.serving():
                client = vf.EvalClientConfig(base_url=url, api_key_var="OFFBYONE_NO_KEY")
                ready.set_result(vf.ModelContext(model=MODEL, client=client))
                await asyncio.Event().wait()
        except Exception as error:  # pass the error to the episodes that wait for the servers
            if ready.done():
                raise
            ready.set_exception(error)


def env_config(name: str, args: dict[str, Any]) -> Any:
    """Return the library's configuration of a taskset's environment.

    If neither the taskset nor `args` chooses a harness, the agent gets the harness without tools,
    because the library's default would give the policy a shell. A harness that executes no code
    needs no cloud sandbox, so by default it runs in a subprocess on this machine.
    """
    config: dict[str, Any] = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    config_class = loaders.env_config_type(name, config.get("id", ""))
    default_id = loaders.default_harness_id(name)
    for role, declared in agent_config_fields(config_class()).items():
        agent = dict(config.get(role, {}))
        harness = dict(agent.get("harness") or {})
        pinned = harness.get("id") or (declared.harness.id if declared.harness else None)
        harness_id = pinned or ("null" if default_id == "bash" else default_id)
        default = declared.harness
        inherited = default.env if default is not None and default.id == harness_id else {}
        if not loaders.harness_class(harness_id).EXECUTES_CODE:
            agent.setdefault("runtime", {"type": "subprocess"})
        # A harness may be a script with its own packages, which our PYTHONPATH would hide. A
        # container (the library's default) has its own PYTHONPATH.
        runtime = (agent.get("runtime") or {}).get("type", declared.runtime.type)
        env = {"PYTHONPATH": ""} if runtime == "subprocess" else {}
        agent["harness"] = {
            **harness,
            "id": harness_id,
            "env": env | inherited | harness.get("env", {}),
        }
        config[role] = agent
    return loaders.resolve_env_config(config)


def _reward_weights(task: Any) -> dict[str, float]:
    weights = {fn.__name__: float(getattr(fn, "_vf_weight", 1.0)) for fn in task.hooks("reward")}
    judges = {judge.reward_name: float(judge.config.weight) for judge in task.plugged_judges()}
    return {name: weight for name, weight in (weights | judges).items() if weight}


def _make_outcomes(episode: Any, roles: dict[str, str], full: bool) -> dict[str, Outcome]:
    """Return role -> outcome. If the context was `full`, ignore the error that this causes."""
    if not episode.ok and not full:
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error message"
        raise RuntimeError(f"the episode of the verifiers environment failed: {why}")
    finished = {trace.id: trace for trace in episode.traces}
    return {role: _make_outcome(finished.get(id)) for id, role in roles.items()}


def _make_outcome(trace: Any) -> Outcome:
    """Return the outcome of a run. The reward is NaN if the library does not train this run."""
    if trace is None or not trace.agent.trainable:  # None: the library retried the run
        return Outcome(reward=math.nan)
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(
        reward=trace.reward,
        rewards={**metrics, **scores},
        stop_reason=_STOPS.get(trace.stop_condition or ""),
    )


def _first_messages(data: Any) -> list[Message]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, user(data.prompt)]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt or [])]
