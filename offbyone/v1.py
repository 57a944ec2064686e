"""Export our environments to `verifiers.v1`, as a taskset and a harness that plays its tasks.

vf-eval offbyone --env.taskset.env reverse-text --env.taskset.options '{"max_length": 8}'
"""

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import (  # pyright: ignore[reportMissingImports]
    ProgramResult,
    SubprocessConfig,
)

from envs.chat_endpoint import is_context_full
from envs.episode import Example, StopReason
from envs.messages import Message
from envs.protocol import Environment
from offbyone.environments import load_for_verifiers
from offbyone.episodes import PlayedEpisode

# Names of verifiers' limits. Trace.stop_condition is the name of the limit that ended a rollout.
_FULL = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
_TIMEOUTS = ("setup_timeout", "agent_timeout", "finalize_timeout")
_LIMITS = {"max_turns": StopReason.MAX_TURNS, **dict.fromkeys(_TIMEOUTS, StopReason.TIMEOUT)}
_LIMITS |= dict.fromkeys(_FULL, StopReason.CONTEXT)


class ExportedConfig(vf.TasksetConfig):
    """The options of the taskset. `options` replaces default options of the environment `env`."""

    env: str = "reverse-text"
    options: dict[str, Any] = {}  # noqa: RUF012 pydantic copies it
    split: Literal["train", "eval"] = "eval"


class ExportedState(vf.State):
    played: Any = None


class ExportedTask(vf.Task[vf.TaskData, ExportedState, vf.TaskConfig]):
    played_by: Environment
    example: Example

    async def setup(self, trace: vf.Trace) -> None:
        trace.state.played = PlayedEpisode(self.played_by, self.example)

    async def score(self, trace: vf.Trace, runtime: Any = None) -> None:
        """Record each named reward as a reward if it has a weight, else as a metric."""
        await super().score(trace, runtime)
        if self.scoring_deferred:
            return
        # If a limit of verifiers ended the rollout, the harness did not set the stop reason.
        episode, limit = trace.state.played.episode, trace.stop_condition
        episode.stop_reason = episode.stop_reason or _LIMITS.get(limit, StopReason.STOP)
        weights = self.played_by.reward_weights
        for name, value in (await trace.state.played.rewards()).items():
            if name in weights:
                trace.record_reward(name, value, weights[name])
            else:
                trace.record_metric(name, value)


class ExportedTaskset(vf.Taskset[ExportedTask, ExportedConfig]):
    def load(self) -> Iterator[ExportedTask]:
        whole = load_for_verifiers(self.config.env, **self.config.options)
        for example in whole.examples(self.config.split):
            env = whole.environment_of(example)
            prompt = env.add_system_prompt(example.messages)
            data = vf.TaskData(id=f"{example.env}-{example.id}", prompt=prompt)
            task = ExportedTask(data, self.config.task)
            task.played_by, task.example = env, example
            yield task


class ExportedHarness(vf.Harness[vf.HarnessConfig]):
    """A harness that plays episodes in this process and asks verifiers' endpoint for each turn."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: vf.TaskData,  # noqa: ARG002 (the episode contains the prompt)
    ) -> ProgramResult:
        """Play the episode. Return status 0 (also if the context is full), or 1 with the error."""
        played: PlayedEpisode = trace.state.played
        specs = played.env.tool_specs or []
        tools = [{"type": "function", "function": spec} for spec in specs]
        headers = {"Authorization": f"Bearer {secret}"}
        # Requests have no timeout, because verifiers limits the time of the whole rollout.
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            while True:
                body = {"model": ctx.model, "messages": played.episode.messages}
                body |= {"tools": tools} if tools else {}
                answer = await client.post("/chat/completions", json=body)
                if is_context_full(answer.status_code, answer.text):
                    played.episode.stop_reason = StopReason.CONTEXT
                    return ProgramResult(0, "", "")
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
                choice = answer.json()["choices"][0]
                message: Message = {k: v for k, v in choice["message"].items() if v is not None}
                message.setdefault("content", "")
                cut_off = choice["finish_reason"] == "length"
                if await played.take_turn(message, cut_off=cut_off) is None:
                    return ProgramResult(0, "", "")

    async def cleanup(
        self,
        trace: vf.Trace,
        runtime: vf.Runtime,  # noqa: ARG002
    ) -> None:
        if (played := trace.state.played) is not None:
            played.env.close(played.episode)


class ExportedEnvConfig(vf.EnvConfig):
    """The options of ExportedEnv. The harness starts no program, so it needs no container."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=SubprocessConfig())


class ExportedEnv(vf.Env[ExportedEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
