"""Exports this project's environments to the classic API of `verifiers`.

vf.load_environment("offbyone", env="reverse-text", max_length=8)
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from verifiers.utils.message_utils import (  # pyright: ignore[reportMissingImports]
    normalize_messages,
)

from envs.episode import Example, Split, StopReason
from envs.protocol import Environment
from envs.verifiers.classic import plain_message
from offbyone.environments import load
from offbyone.episodes import Played

PLAYED = "offbyone_episode"  # key of the Played object in vf.State


def load_environment(env: str = "reverse-text", **options: Any) -> "Exported":
    """Return the environment `env` (a name in conf/env or module.Class) with these options."""
    return Exported(load(env, **options))


class Exported(vf.MultiTurnEnv):
    """The verifiers environment that replies with `Environment.reply` and scores with `score`."""

    def __init__(self, env: Environment) -> None:
        examples = cache(env.examples)
        super().__init__(
            dataset=lambda: _dataset(env, examples("train"), "train"),
            eval_dataset=lambda: _dataset(env, examples("eval"), "eval"),
            tool_defs=env.tool_specs,
            rubric=ExportedRubric(),
            # no limit, because env_response counts turns and must receive the last turn
            max_turns=-1,
        )
        self._exported, self._examples = env, examples

    async def setup_state(self, state: vf.State) -> None:
        """Create the episode for the dataset row in `state`."""
        info = state["info"]
        state[PLAYED] = Played(self._exported, self._examples(info["split"])[info["id"]])

    async def env_response(
        self,
        messages: vf.Messages,  # noqa: ARG002 (the episode holds them)
        state: vf.State,
        **options: Any,  # noqa: ARG002
    ) -> vf.Messages:
        """Return the environment's reply. An empty final response ends the rollout."""
        played: Played = state[PLAYED]
        cut_off = state["trajectory"][-1]["is_truncated"]
        try:
            reply = await played.turn(_newest_message(state), cut_off=cut_off)
        except Exception as error:  # the loop of verifiers handles only vf.Error
            raise vf.Error(f"{type(played.env).__name__}.reply: {error}") from error
        if reply is None:
            state["final_env_response"] = []
        return normalize_messages(reply or [])


class ExportedRubric(vf.Rubric):
    """The rubric that records named rewards as metrics and their weighted sum as the reward."""

    async def score_rollout(self, state: vf.State) -> None:
        """Score one rollout. An exception in `score` is stored as the rollout's error."""
        state["reward"], state["metrics"] = 0.0, {}
        if state["error"] is not None:
            return
        played: Played = state[PLAYED]
        # If a limit of verifiers ended the rollout, env_response did not receive the last turn.
        if len(state["trajectory"]) > played.episode.turns:
            played.add(_newest_message(state))
        played.episode.stop_reason = played.episode.stop_reason or _stop_reason(state)
        try:
            rewards = await played.rewards()
        except Exception as error:  # noqa: BLE001 (environment code may raise anything)
            state["error"] = vf.Error(f"{type(played.env).__name__}.score: {error}")
            return
        weights = played.env.reward_weights
        state["metrics"] = rewards
        state["reward"] = sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())

    async def score_group(self, states: list[vf.State]) -> None:
        """Score each rollout separately. The advantage is the reward minus the group's mean."""
        for state in states:
            await self.score_rollout(state)
        mean = sum(state["reward"] for state in states) / max(1, len(states))
        for state in states:
            state["advantage"] = state["reward"] - mean

    @vf.cleanup
    async def release(self, state: vf.State) -> None:
        """Release the resources of the episode after scoring."""
        played: Played | None = state.get(PLAYED)
        if played is not None:
            played.env.close(played.episode)


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
    return plain_message(state["trajectory"][-1]["completion"][-1])


def _stop_reason(state: vf.State) -> StopReason:
    if state.get("timed_out"):
        return StopReason.TIMEOUT
    return StopReason.CONTEXT if state.get("prompt_too_long") else StopReason.STOP
