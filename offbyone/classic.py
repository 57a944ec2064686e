"""This project's environments as environments of `verifiers`, classic API.

vf.load_environment("offbyone", env="reverse-text", max_length=8)
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from verifiers.utils.message_utils import (  # pyright: ignore[reportMissingImports]
    normalize_messages,
)

from envs import threads
from envs.episode import Episode, Example, Split, StopReason, rewards_by_name
from envs.protocol import Environment
from envs.verifiers.classic import plain_message
from offbyone.environments import load

EPISODE = "offbyone_episode"  # key of the Episode in the library's state


def load_environment(env: str = "reverse-text", **options: Any) -> "Exported":
    """Return environment `env` (a file of conf/env, or module.Class) with `options` changed."""
    return Exported(load(env, **options))


class Exported(vf.MultiTurnEnv):
    """The library's rollout loop around `Environment.reply`, its rubric around `score`."""

    def __init__(self, env: Environment) -> None:
        examples = cache(env.examples)
        super().__init__(
            dataset=lambda: _dataset(env, examples("train"), "train"),
            eval_dataset=lambda: _dataset(env, examples("eval"), "eval"),
            tool_defs=env.tool_specs,
            rubric=ExportedRubric(env),
            max_turns=-1,  # no limit, because env_response counts turns and must see the last one
        )
        self._exported, self._examples = env, examples

    async def setup_state(self, state: vf.State) -> None:
        """Begin the episode of the row."""
        info = state["info"]
        example = self._examples(info["split"])[info["id"]]
        env = self._exported.environment_of(example)
        state[EPISODE] = Episode(example=example, messages=env.opened(example.messages))

    async def env_response(
        self,
        messages: vf.Messages,  # noqa: ARG002 (the episode holds them)
        state: vf.State,
        **options: Any,  # noqa: ARG002
    ) -> vf.Messages:
        """Return the environment's reply. An empty reply ends the rollout."""
        episode: Episode = state[EPISODE]
        message = _newest_message(state)
        env = self._exported.environment_of(episode.example)
        if state["trajectory"][-1]["is_truncated"]:
            return _end(state, StopReason.MAX_TOKENS)
        try:
            reply = await threads.call(env.reply, episode, message)
        except Exception as error:  # the library's loop handles vf.Error only
            raise vf.Error(f"{type(env).__name__}.reply: {error}") from error
        if reply is None:
            return _end(state, StopReason.STOP)
        if episode.turns >= env.max_turns:
            return _end(state, StopReason.MAX_TURNS)
        episode.messages += reply
        return normalize_messages(reply)


class ExportedRubric(vf.Rubric):
    """The environment's named rewards as metrics, and their weighted sum as the reward."""

    def __init__(self, env: Environment) -> None:
        super().__init__()
        self._exported = env

    async def score_rollout(self, state: vf.State) -> None:
        """Score one rollout. A rollout that cannot be judged ends in an error."""
        state["reward"], state["metrics"] = 0.0, {}
        if state["error"] is not None:
            return
        episode: Episode = state[EPISODE]
        # If a limit of the library ended the rollout, env_response did not see the last turn.
        _newest_message(state)
        episode.stop_reason = episode.stop_reason or _stop_reason(state)
        env = self._exported.environment_of(episode.example)
        try:
            scored = await threads.call(env.score, episode)
            rewards, _ = rewards_by_name(scored, episode.turns)
        except Exception as error:  # noqa: BLE001 (environment code may raise anything)
            state["error"] = vf.Error(f"{type(env).__name__}.score: {error}")
            return
        reward = sum(weight * rewards.get(name, 0.0) for name, weight in env.reward_weights.items())
        state["metrics"] = rewards
        if math.isfinite(reward):
            state["reward"] = reward
        else:
            state["error"] = vf.Error(f"{type(env).__name__}.score returned NaN or infinity")

    async def score_group(self, states: list[vf.State]) -> None:
        """Score each rollout by itself. The advantage is the reward minus the group's mean."""
        for state in states:
            await self.score_rollout(state)
        mean = sum(state["reward"] for state in states) / max(1, len(states))
        for state in states:
            state["advantage"] = state["reward"] - mean

    @vf.cleanup
    async def release(self, state: vf.State) -> None:
        """Release what the episode holds, after scoring."""
        episode: Episode | None = state.get(EPISODE)
        if episode is not None:
            self._exported.environment_of(episode.example).close(episode)


def _dataset(env: Environment, examples: Sequence[Example], split: Split) -> Dataset:
    rows = [
        {
            "prompt": env.environment_of(example).opened(example.messages),
            "answer": "",
            "info": json.dumps({"split": split, "id": i, "env": example.env}),
        }
        for i, example in enumerate(examples)
    ]
    return Dataset.from_list(rows)


def _newest_message(state: vf.State) -> dict[str, Any]:
    """Add the policy's newest message to the episode, if it is missing there, and return it."""
    episode: Episode = state[EPISODE]
    if len(state["trajectory"]) > episode.turns:
        episode.messages.append(plain_message(state["trajectory"][-1]["completion"][-1]))
        episode.turns = len(state["trajectory"])
    return episode.messages[-1]


def _end(state: vf.State, reason: StopReason) -> vf.Messages:
    """End the rollout after the policy's turn, by an empty final response."""
    state[EPISODE].stop_reason = reason
    state["final_env_response"] = []
    return []


def _stop_reason(state: vf.State) -> StopReason:
    if state.get("timed_out"):
        return StopReason.TIMEOUT
    return StopReason.CONTEXT if state.get("prompt_too_long") else StopReason.STOP
