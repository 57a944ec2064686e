"""What an environment sees of one attempt: the example, the conversation so far, why it ended."""

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
    ENGINE_ERROR = "engine_error"  # vLLM did not answer, or broke off

    @property
    def truncated(self) -> bool:
        """True where the policy was cut off in mid-sentence."""
        return self in (StopReason.MAX_TOKENS, StopReason.CONTEXT)


@dataclass(frozen=True)
class Example:
    """One thing to try: the opening messages, and what is needed to score the attempt."""

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
    tool_calls: int = 0  # answered so far, mistaken ones included
    tool_errors: int = 0  # of these, answered with an error
    stop_reason: StopReason | None = None  # set before `score`
    memory: dict[str, Any] = field(default_factory=dict)  # the environment's own, one per episode

    @property
    def text(self) -> str:
        """What the policy said last; empty before its first turn."""
        turns = (m for m in reversed(self.messages) if m["role"] == "assistant")
        return next((m.get("content") or "" for m in turns), "")
