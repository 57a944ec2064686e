"""What an environment of either generation of `verifiers` is to us."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.episode import Split, StopReason
from envs.messages import Message
from envs.protocol import Speak


@dataclass(frozen=True)
class Row:
    """One of their examples."""

    messages: list[Message]  # how the conversation opens
    data: Any  # what their code calls a row, or a task


@dataclass(frozen=True)
class Outcome:
    """How one of their episodes went, by their own account."""

    reward: float
    rewards: dict[str, float] = field(default_factory=dict)  # named rewards and metrics, unweighted
    stop_reason: StopReason | None = None  # None: that of the policy's last turn


def check_text(env_id: str, rows: Iterable[Row]) -> None:
    """ValueError where a prompt shows anything but text."""
    for row in rows:
        for message in row.messages:
            parts = message.get("content")
            kinds = {part["type"] for part in parts} if isinstance(parts, list) else set()
            if kinds - {"text"}:
                raise ValueError(
                    f"env.id={env_id} shows {', '.join(sorted(kinds - {'text'}))}, and the policy "
                    "reads text: use another environment"
                )


class World(Protocol):
    """One loaded environment of either generation."""

    @property
    def max_concurrent(self) -> int | None:
        """Episodes at once where nobody said how many; None: as many as the sampler allows."""
        ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weights of the named rewards."""
        ...

    def rows(self, split: Split, limit: int | None) -> list[Row] | None:
        """The first `limit` rows; None where it has no such split."""
        ...

    async def play(self, row: Row, speak: Speak) -> Outcome:
        """Play one episode. Raises what went wrong in their code."""
        ...
