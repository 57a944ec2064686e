"""The common interface of both generations of the `verifiers` library."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.episode import Split, StopReason
from envs.messages import Message
from envs.protocol import Speak
from envs.verifiers.endpoint import text_of


@dataclass(frozen=True)
class Row:
    """One example of the library."""

    messages: list[Message]  # the opening of the conversation
    data: Any  # the library's own row or task


@dataclass(frozen=True)
class Outcome:
    """The library's result of one episode."""

    reward: float
    rewards: dict[str, float] = field(default_factory=dict)  # named rewards and metrics, unweighted
    stop_reason: StopReason | None = None  # None: the reason of the policy's last turn


class Adapter(Protocol):
    """One loaded environment of either generation of the library."""

    max_concurrent: int | None  # episodes at once; None: the sampler's limit alone
    reward_weights: dict[str, float]

    def rows(self, split: Split, limit: int | None) -> list[Row] | None:
        """Return the first `limit` rows, or None if there is no such split."""
        ...

    async def play(self, row: Row, speak: Speak) -> Outcome:
        """Play one episode. Raise whatever the environment's code raises."""
        ...


def check_text(env_id: str, rows: Iterable[Row]) -> None:
    """Raise ValueError if a prompt contains anything but text."""
    for message in (message for row in rows for message in row.messages):
        try:
            text_of(message.get("content"))
        except ValueError as error:
            raise ValueError(f"env.id={env_id}: {error}; use another environment") from error
