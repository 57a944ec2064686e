"""The classic API of `verifiers`: an environment with a dataset, a rollout loop and a rubric.

Their rollout asks its `Client` for every turn; ours asks the policy in training.
"""

# pyright: reportAttributeAccessIssue=false
# (pyright takes `verifiers` for the folder that this file is in)

import json
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
from verifiers.types import (  # pyright: ignore[reportMissingImports]
    Response,
    ResponseMessage,
    ToolCall,
    Usage,
)

from envs.episode import Split, StopReason
from envs.messages import Message, user
from envs.protocol import ContextFull, Speak, Spoken
from envs.verifiers.world import Outcome, Row

MODEL = "policy"
_STOPS = {"max_turns_reached": StopReason.MAX_TURNS, "timeout_reached": StopReason.TIMEOUT}


class ClassicWorld:
    """An environment that `load_environment` made.

    Raises:
        ValueError: a reward of it compares the rollouts of a group.

    """

    max_concurrent = None  # its rollouts are coroutines

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        with _own_signals():
            self._env = vf.load_environment(name, **args)
        if self._env.requires_group_rollouts:
            raise ValueError(
                f"env.id={name} has rewards that compare the rollouts of a group, and here each "
                "rollout is scored by itself: use another environment"
            )
        rubric = self._env.rubric
        listed = zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True)
        self.reward_weights = {name: float(weight) for name, weight in listed if weight}

    def rows(self, split: Split, limit: int | None) -> list[Row] | None:
        """The rows of its dataset, or of its eval_dataset."""
        build = self._env.build_eval_dataset if split == "eval" else self._env.build_dataset
        dataset = build()
        if dataset is None:
            return None
        size = len(dataset) if limit is None else min(limit, len(dataset))
        return [Row(_opening(row["prompt"]), row) for row in dataset.select(range(size)).to_list()]

    async def play(self, row: Row, speak: Speak) -> Outcome:
        """One rollout by their own loop, scored by their rubric."""
        (output,) = await self._env.run_group([row.data], PolicyClient(speak), MODEL, {})
        if output["error"]:
            raise RuntimeError(f"the rollout ended in an error: {output['error']!r}")
        stop = _STOPS.get(output["stop_condition"] or "")
        # Of one turn, or of a last one cut off, the turn itself says better why it ended.
        cut_off = output["is_truncated"] or getattr(self._env, "max_turns", 1) == 1
        return Outcome(
            reward=float(output["reward"]),
            rewards={name: float(value) for name, value in (output["metrics"] or {}).items()},
            stop_reason=None if stop is StopReason.MAX_TURNS and cut_off else stop,
        )


class PolicyClient(Client):
    """Their client whose endpoint is the policy in training."""

    def __init__(self, speak: Speak) -> None:
        super().__init__(speak)

    def setup_client(self, config: object) -> object:
        raise AssertionError(f"made from a Speak, never from {config}")

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}

    async def to_native_prompt(self, messages: list[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [our_message(message) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,  # noqa: ARG002 there is one policy
        sampling_args: dict[str, Any],  # noqa: ARG002 the sampler's count
        tools: list[dict[str, Any]] | None = None,
        **knobs: Any,  # noqa: ARG002
    ) -> Spoken:
        try:
            return await self.client(prompt, tools)
        except ContextFull as error:
            raise vf.OverlongPromptError(str(error)) from error

    async def raise_from_native_response(self, response: Spoken) -> None:
        """Whatever the policy says is a valid turn."""

    async def from_native_response(self, response: Spoken) -> Response:
        message = response.message
        calls = message.get("tool_calls") or []
        reason = "length" if response.cut_off else "tool_calls" if calls else "stop"
        return Response(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=MODEL,
            usage=Usage(
                prompt_tokens=response.prompt_tokens,
                reasoning_tokens=0,
                completion_tokens=response.completion_tokens,
                total_tokens=response.prompt_tokens + response.completion_tokens,
            ),
            message=ResponseMessage(
                content=message["content"],
                reasoning_content=message.get("reasoning_content"),
                tool_calls=[their_call(call) for call in calls] or None,
                finish_reason=reason,
                is_truncated=response.cut_off,
            ),
        )

    async def close(self) -> None:
        """Nothing is held."""


def their_call(call: Message) -> ToolCall:
    """A tool call in their flat form: arguments as JSON text, or as the policy wrote them."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=call["id"], name=call["function"]["name"], arguments=text)


def our_message(message: Any) -> Message:
    """One of their messages as a plain dict in OpenAI form."""
    plain: Message = {"role": message.role, "content": _text(message.content)}
    if reasoning := getattr(message, "reasoning_content", None):
        plain["reasoning_content"] = reasoning
    if calls := getattr(message, "tool_calls", None):
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if call_id := getattr(message, "tool_call_id", None):
        plain["tool_call_id"] = call_id
    return plain


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        kinds = {part["type"] for part in parts}
        if kinds - {"text"}:
            raise ValueError(f"the policy reads text, not {sorted(kinds - {'text'})}")
        return "".join(part["text"] for part in parts)
    return content or ""


def _opening(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [user(prompt)]
    # Arrow gives every message every key that any of them has.
    return [{key: value for key, value in m.items() if value is not None} for m in prompt]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Loading an environment sets handlers for the signals that end us; put ours back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
