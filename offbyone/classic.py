"""Export our environments to the classic API of the library `verifiers` (0.1).

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
from offbyone.environments import load_for_verifiers
from offbyone.episodes import PlayedEpisode

PLAYED = "offbyone_episode"  # key of the PlayedEpisode in vf.State


def load_environment(env: str = "reverse-text", **options: Any) -> "ExportedEnvironment":
    """Return the environment `env` (a name in conf/env, or module.Class) with these options."""
    return ExportedEnvironment(load_for_verifiers(env, **options))


class ExportedEnvironment(vf.MultiTurnEnv):
    """A verifiers environment that calls `reply` and `score` of one of our environments."""

    def __init__(self, env: Environment) -> None:
        examples = cache(env.examples)
        super().__init__(
            dataset=lambda: _make_dataset(env, examples("train"), "train"),
            eval_dataset=lambda: _make_dataset(env, examples("eval"), "eval"),
            tool_defs=env.tool_specs,
            rubric=ExportedRubric(),
            # With a limit, verifiers would end the rollout before `reply` reads the last turn.
            # PlayedEpisode calls `reply` first, and then applies the environment's limit of turns.
            max_turns=-1,
        )
        self._exported, self._examples = env, examples

    async def setup_state(self, state: vf.State) -> None:
        info = state["info"]
        state[PLAYED] = PlayedEpisode(self._exported, self._examples(info["split"])[info["id"]])

    async def env_response(
        self,
        messages: vf.Messages,  # noqa: ARG002 (the episode contains them)
        state: vf.State,
        **options: Any,  # noqa: ARG002
    ) -> vf.Messages:
        """Return the environment's reply. After the last turn, set state["final_env_response"]."""
        reply = await _take_newest_turn(state)
        if reply is None:
            state["final_env_response"] = []
        return normalize_messages(reply or [])


class ExportedRubric(vf.Rubric):
    """A rubric that stores our named rewards as metrics and their weighted sum as the reward."""

    async def score_rollout(self, state: vf.State) -> None:
        state["reward"], state["metrics"] = 0.0, {}
        if state["error"] is not None:
            return
        played: PlayedEpisode = state[PLAYED]
        try:
            # If a limit of verifiers ended the rollout, `env_response` did not see the last turn.
            if len(state["trajectory"]) > played.episode.turns:
                await _take_newest_turn(state)
            played.episode.stop_reason = played.episode.stop_reason or _stop_reason(state)
            rewards = await played.rewards()
        except Exception as error:  # noqa: BLE001 (environment code may raise anything)
            state["error"] = vf.Error(f"{type(played.env).__name__}.score failed: {error}")
            return
        weights = played.env.reward_weights
        state["metrics"] = rewards
        state["reward"] = sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())

    async def score_group(self, states: list[vf.State]) -> None:
        for state in states:
            await self.score_rollout(state)
        mean = sum(state["reward"] for state in states) / max(1, len(states))
        for state in states:
            state["advantage"] = state["reward"] - mean

    @vf.cleanup
    async def release(self, state: vf.State) -> None:
        played: PlayedEpisode | None = state.get(PLAYED)
        if played is not None:
            played.env.close(played.episode)


def _make_dataset(env: Environment, examples: Sequence[Example], split: Split) -> Dataset:
    rows = [
        {
            "prompt": env.environment_of(example).add_system_prompt(example.messages),
            "answer": "",
            "info": json.dumps({"split": split, "id": i, "env": example.env}),
        }
        for i, example in enumerate(examples)
    ]
    return Dataset.from_list(rows)


async def _take_newest_turn(state: vf.State) -> list[dict[str, Any]] | None:
    played: PlayedEpisode = state[PLAYED]
    step = state["trajectory"][-1]
    message = plain_message(step["completion"][-1])
    try:
        return await played.take_turn(message, cut_off=step["is_truncated"])
    except Exception as error:  # verifiers handles only vf.Error
        raise vf.Error(f"{type(played.env).__name__}.reply failed: {error}") from error


def _stop_reason(state: vf.State) -> StopReason:
    if state.get("timed_out"):
        return StopReason.TIMEOUT
    # verifiers' token limit counts all turns, but MAX_TOKENS means one turn, so return CONTEXT.
    is_full = state.get("stop_condition") == "max_total_completion_tokens_reached"
    return StopReason.CONTEXT if is_full or state.get("prompt_too_long") else StopReason.STOP
