"""This project's environments as a taskset of `verifiers.v1`, with the harness that plays them.

vf-eval offbyone --env.taskset.env reverse-text --env.taskset.knobs '{"max_length": 8}'
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import (  # pyright: ignore[reportMissingImports]
    ProgramResult,
    SubprocessConfig,
)

from envs import threads
from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.messages import Message
from envs.protocol import Environment
from offbyone.environments import load


class ExportedConfig(vf.TasksetConfig):
    """Which environment, which of its options (`knobs`) are changed, and which split."""

    env: str = "reverse-text"
    knobs: dict[str, Any] = {}  # noqa: RUF012 pydantic copies it
    split: Literal["train", "eval"] = "eval"


class ExportedState(vf.State):
    """The Episode of the rollout, and the environment that plays it."""

    played_by: Any = None
    episode: Any = None


class ExportedTask(vf.Task[vf.TaskData, ExportedState, vf.TaskConfig]):
    """One example of the environment."""

    played_by: Environment
    example: Example

    async def setup(self, trace: vf.Trace) -> None:
        """Begin the episode."""
        trace.state.played_by = self.played_by
        messages = self.played_by.opened(self.example.messages)
        trace.state.episode = Episode(example=self.example, messages=messages)

    async def score(self, trace: vf.Trace, runtime: Any = None) -> None:
        """Record the named rewards with their weights, and rewards without a weight as metrics."""
        await super().score(trace, runtime)
        if self.scoring_deferred:
            return
        env, episode = self.played_by, trace.state.episode
        rewards, _ = rewards_by_name(await threads.call(env.score, episode), episode.turns)
        if not all(map(math.isfinite, rewards.values())):
            raise ValueError(f"{type(env).__name__}.score returned NaN or infinity: {rewards}")
        for name, value in rewards.items():
            if name in env.reward_weights:
                trace.record_reward(name, value, env.reward_weights[name])
            else:
                trace.record_metric(name, value)


class ExportedTaskset(vf.Taskset[ExportedTask, ExportedConfig]):
    """The examples of one environment, which may be a mixture."""

    def load(self) -> Iterator[ExportedTask]:
        """Yield all examples of the split."""
        whole = load(self.config.env, **self.config.knobs)
        for example in whole.examples(self.config.split):
            env = whole.environment_of(example)
            prompt = env.opened(example.messages)
            data = vf.TaskData(id=f"{example.env}-{example.id}", prompt=prompt)
            task = ExportedTask(data, self.config.task)
            task.played_by, task.example = env, example
            yield task


class ExportedHarness(vf.Harness[vf.HarnessConfig]):
    """Play the episode in this process: turns from the library's endpoint, replies from `env`."""

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
        data: vf.TaskData,  # noqa: ARG002 (the episode holds the prompt)
    ) -> ProgramResult:
        """Return status 0, or status 1 with the error text of a failed model call."""
        env, episode = trace.state.played_by, trace.state.episode
        tools = [{"type": "function", "function": spec} for spec in env.tool_specs or []]
        headers = {"Authorization": f"Bearer {secret}"}
        # No timeout here, because the library has its own.
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
            while True:
                body = {"model": ctx.model, "messages": episode.messages}
                body |= {"tools": tools} if tools else {}
                answer = await client.post("/chat/completions", json=body)
                if answer.status_code == 400 and "context" in answer.text:
                    episode.stop_reason = StopReason.CONTEXT
                    return ProgramResult(0, "", "")
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
                if await _goes_on(env, episode, answer.json()["choices"][0]):
                    continue
                return ProgramResult(0, "", "")

    async def cleanup(
        self,
        trace: vf.Trace,
        runtime: vf.Runtime,  # noqa: ARG002
    ) -> None:
        """Release what the episode holds."""
        if trace.state.episode is not None:
            trace.state.played_by.close(trace.state.episode)


class ExportedEnvConfig(vf.EnvConfig):
    """One agent on this machine, because the harness runs no program."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=SubprocessConfig())


class ExportedEnv(vf.Env[ExportedEnvConfig]):
    """An environment in which one agent plays one task."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play the task."""
        await agents.agent.run(task)


async def _goes_on(env: Environment, episode: Episode, choice: dict[str, Any]) -> bool:
    """Add the policy's turn and the reply to the episode. Return False at its end."""
    message: Message = {k: v for k, v in choice["message"].items() if v is not None}
    message.setdefault("content", "")
    episode.messages.append(message)
    episode.turns += 1
    if choice["finish_reason"] == "length":
        episode.stop_reason = StopReason.MAX_TOKENS
        return False
    reply = await threads.call(env.reply, episode, message)
    if reply is None or episode.turns >= env.max_turns:
        episode.stop_reason = StopReason.STOP if reply is None else StopReason.MAX_TURNS
        return False
    episode.messages += reply
    return True
