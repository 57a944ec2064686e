"""The data that an environment sees: the example, the conversation and the stop reason.

`score` returns for each reward one number, or a list with one number per turn of the policy:

    {"exact": 1.0}                  one number for the episode
    {"exact": [1.0, 0.0, 1.0]}      one number per turn; the reward is their sum
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from envs.messages import Message

Split = Literal["train", "eval"]


class StopReason(StrEnum):
    """The reason why an episode ended."""

    STOP = "stop"  # The policy ended its turn, and the environment had no reply.
    MAX_TOKENS = "max_tokens"  # One turn reached its token limit.
    CONTEXT = "context"  # The whole episode reached max_seq_len.
    MAX_TURNS = "max_turns"
    TIMEOUT = "timeout"  # The episode exceeded sampler.rollout_timeout.
    ENV_ERROR = "env_error"  # The environment's code raised an exception.
    ENGINE_ERROR = "engine_error"  # The server did not answer, or answered with an error.

    @property
    def truncated(self) -> bool:
        return self in (StopReason.MAX_TOKENS, StopReason.CONTEXT)


@dataclass(frozen=True)
class Example:
    """One example: the opening messages, and the data with which `score` judges an episode."""

    id: int  # index of the example in its split
    env: str  # name of the environment that plays the example
    messages: list[Message]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """One rollout of an example, as the environment sees it: messages, not tokens."""

    example: Example
    messages: list[Message]  # the conversation, including the example's messages
    turns: int = 0  # number of assistant turns
    tool_calls: int = 0  # number of tool calls, including failed calls
    tool_errors: int = 0  # number of tool calls that were answered with an error
    stop_reason: StopReason | None = None  # None until the episode ends
    number: int = 0  # the strategy's `seed` of this attempt, unique in its group
    policy_version: int = 0  # newest version of the policy when the episode's group was started
    reward: float | None = None  # set before `teacher_messages` runs; None if the episode failed
    memory: dict[str, Any] = field(default_factory=dict)  # data that the environment stores
    role: str = ""  # role of this episode, if the policy plays several; all roles share `memory`

    @property
    def text(self) -> str:
        """The content of the policy's last message; empty before the policy's first turn."""
        turns = (m for m in reversed(self.messages) if m["role"] == "assistant")
        return next((m.get("content") or "" for m in turns), "")


def rewards_by_name(
    scored: Mapping[str, Any], turns: int
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return (name -> reward of the episode, name -> numbers per turn if `score` gave a list)."""
    rewards: dict[str, float] = {}
    per_turn: dict[str, tuple[float, ...]] = {}
    for name, value in scored.items():
        if not isinstance(value, Iterable) or isinstance(value, str):
            rewards[name] = float(value)
            continue
        numbers = per_turn[name] = tuple(float(number) for number in value)
        if len(numbers) != turns:
            raise ValueError(
                f"score returned {len(numbers)} numbers for {name!r} after {turns} turns of the "
                "policy: return one for each turn, or one number for the whole episode"
            )
        # math.fsum rounds only once, so the sum of ten numbers 0.1 is exactly 1. But math.fsum may
        # raise for infinities, so a list with an infinity gives NaN.
        rewards[name] = math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return rewards, per_turn
