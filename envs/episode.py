"""What an environment sees of one attempt: the example, the conversation so far, the stop reason.

`score` returns one number per reward, or one number for each turn of the policy:

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
    """Why an episode ended."""

    STOP = "stop"  # the policy closed its turn and the environment had no reply
    MAX_TOKENS = "max_tokens"  # one turn used up its token limit
    CONTEXT = "context"  # the whole episode filled max_seq_len
    MAX_TURNS = "max_turns"
    TIMEOUT = "timeout"  # sampler.rollout_timeout
    ENV_ERROR = "env_error"  # the environment raised
    ENGINE_ERROR = "engine_error"  # vLLM did not answer, or stopped in the middle of an answer

    @property
    def truncated(self) -> bool:
        """True if a token limit ended the policy's last turn."""
        return self in (StopReason.MAX_TOKENS, StopReason.CONTEXT)


@dataclass(frozen=True)
class Example:
    """One task: the opening messages, and what `score` needs to judge an attempt."""

    id: int  # position in the environment's split
    env: str  # name of the environment
    messages: list[Message]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """One attempt at an example as the environment sees it: text, never tokens."""

    example: Example
    messages: list[Message]  # the whole conversation so far, opening messages included
    turns: int = 0  # assistant turns so far
    tool_calls: int = 0  # calls answered so far, failed calls included
    tool_errors: int = 0  # calls that were answered with an error
    stop_reason: StopReason | None = None  # set before `score`
    memory: dict[str, Any] = field(default_factory=dict)  # for the environment's own state

    @property
    def text(self) -> str:
        """Content of the policy's last message; empty before its first turn."""
        turns = (m for m in reversed(self.messages) if m["role"] == "assistant")
        return next((m.get("content") or "" for m in turns), "")


def rewards_by_name(
    scored: Mapping[str, Any], turns: int
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return each reward as one number, and the rewards that were given per turn as tuples.

    Raise ValueError if a reward per turn does not have one number for each of the `turns`.
    """
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
        # fsum, so that three thirds are 1. It raises on infinities of both signs.
        rewards[name] = math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return rewards, per_turn
