"""The adapter for the classic API of `verifiers`: environments with datasets and reward functions.

The library asks a `Client` for every turn. Our PolicyClient gets the turn from the policy.
"""

# pyright: reportAttributeAccessIssue=false
# Needed because pyright mistakes this folder, `verifiers`, for the library.

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from openai.types.chat import ChatCompletion  # pyright: ignore[reportMissingImports]
from verifiers.clients import (  # pyright: ignore[reportMissingImports]
    OpenAIChatCompletionsClient,
)

from envs.episode import Split, StopReason
from envs.messages import Message, tool_call_entry, user
from envs.policy_endpoint import MODEL, completion, plain_text
from envs.protocol import ContextFull, Speak
from envs.verifiers.adapter import Outcome, Row

_STOPS = {"max_turns_reached": StopReason.MAX_TURNS, "timeout_reached": StopReason.TIMEOUT}


class ClassicAdapter:
    max_concurrent: int | None = None  # no limit, because an episode is a coroutine, not a process

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        with _restore_signal_handlers():
            self._env = vf.load_environment(name, **args)
        if self._env.requires_group_rollouts:
            raise ValueError(
                f"env.id={name} has rewards that compare the rollouts of a group, but "
                "env=verifiers scores each rollout alone: choose another environment"
            )
        rubric = self._env.rubric
        pairs = zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True)
        self.reward_weights = {name: float(weight) for name, weight in pairs if weight}

    def rows(self, split: Split, limit: int | None) -> list[Row] | None:
        build = self._env.build_eval_dataset if split == "eval" else self._env.build_dataset
        dataset = build()
        if dataset is None:
            return None
        size = len(dataset) if limit is None else min(limit, len(dataset))
        rows = dataset.select(range(size)).to_list()
        return [Row(_first_messages(row["prompt"]), row) for row in rows]

    async def play(self, row: Row, speak: Speak) -> dict[str, Outcome]:
        (output,) = await self._env.run_group([row.data], PolicyClient(speak), MODEL, {})
        if output["error"]:
            raise RuntimeError(f"verifiers ended the rollout with an error: {output['error']!r}")
        stop = _STOPS.get(output["stop_condition"] or "")
        # For a truncated turn or max_turns=1, the stop reason of the last turn is more exact.
        prefer_last = output["is_truncated"] or getattr(self._env, "max_turns", 1) == 1
        outcome = Outcome(
            reward=float(output["reward"]),
            rewards={name: float(value) for name, value in (output["metrics"] or {}).items()},
            stop_reason=None if stop is StopReason.MAX_TURNS and prefer_last else stop,
        )
        return {"": outcome}


class PolicyClient(OpenAIChatCompletionsClient):
    """The library's chat client, changed so that the policy in training generates every turn."""

    async def to_native_prompt(self, messages: list[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [plain_message(message) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,  # noqa: ARG002 (there is one policy)
        sampling_args: dict[str, Any],  # noqa: ARG002 (the run's sampler decides)
        tools: list[dict[str, Any]] | None = None,
        **options: Any,  # noqa: ARG002
    ) -> Any:
        try:
            turn = await self.client(prompt, [t["function"] for t in tools] if tools else None)
        except ContextFull as error:
            raise vf.OverlongPromptError(str(error)) from error
        return ChatCompletion.model_validate(completion(turn))

    async def raise_from_native_response(self, response: object) -> None:
        """Accept every turn, because a turn of the policy is never an error."""

    async def close(self) -> None:
        """Do nothing, because the client has no connection."""


def plain_message(message: Any) -> Message:
    """Convert a message of the library to a plain dict in the format of the OpenAI API."""
    content = message.content
    if isinstance(content, list):
        content = [part if isinstance(part, dict) else part.model_dump() for part in content]
    plain: Message = {"role": message.role, "content": plain_text(content)}
    if reasoning := getattr(message, "reasoning_content", None):
        plain["reasoning_content"] = reasoning
    if calls := getattr(message, "tool_calls", None):
        plain["tool_calls"] = [tool_call_entry(c.name, c.arguments, c.id) for c in calls]
    if call_id := getattr(message, "tool_call_id", None):
        plain["tool_call_id"] = call_id
    return plain


def _first_messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [user(prompt)]
    # Remove keys with the value None. Arrow adds them, so that all messages have the same keys.
    return [{key: value for key, value in m.items() if value is not None} for m in prompt]


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
