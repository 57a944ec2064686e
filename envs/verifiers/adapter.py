"""The interface of our adapters for the two APIs of the `verifiers` library."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.episode import Split, StopReason
from envs.messages import Message
from envs.policy_endpoint import plain_text
from envs.protocol import Speak


@dataclass(frozen=True)
class Row:
    messages: list[Message]  # opening messages of the conversation
    data: Any  # the library's row (classic API) or task (API v1)


@dataclass(frozen=True)
class Outcome:
    """The result of an episode that the `verifiers` library played."""

    reward: float
    rewards: dict[str, float] = field(default_factory=dict)  # unweighted rewards and metrics
    stop_reason: StopReason | None = None  # None: use the stop reason of the last turn


class Adapter(Protocol):
    """A loaded environment of the `verifiers` library, of either API."""

    max_concurrent: int | None  # maximum number of parallel episodes; None: the sampler's limit
    reward_weights: dict[str, float]

    def rows(self, split: Split, limit: int | None) -> list[Row] | None:
        """Return the first `limit` rows of a split; None if the split does not exist."""
        ...

    async def play(self, row: Row, speak: Speak) -> dict[str, Outcome]:
        """Play an episode. Return role -> outcome. Raise an error if the environment fails."""
        ...


def check_text(env_id: str, rows: Iterable[Row]) -> None:
    """Raise ValueError if a prompt contains an image or anything else that is not text."""
    for message in (message for row in rows for message in row.messages):
        try:
            plain_text(message.get("content"))
        except ValueError as error:
            raise ValueError(f"env.id={env_id}: {error}: choose another environment") from error
