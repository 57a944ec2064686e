"""The classic API of `verifiers`: an environment with a dataset, a rollout loop and a rubric.

The library's rollout asks a `Client` for every turn. PolicyClient asks the policy in training.
"""

# pyright: reportAttributeAccessIssue=false
# (pyright mistakes `verifiers` for the folder of this file)

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
from envs.verifiers.adapter import Outcome, Row
from envs.verifiers.endpoint import MODEL, as_json_text, text_of

_STOPS = {"max_turns_reached": StopReason.MAX_TURNS, "timeout_reached": StopReason.TIMEOUT}


class ClassicAdapter:
    """An environment that `load_environment` made."""

    max_concurrent = None  # its rollouts are coroutines, so the sampler's limit is enough

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        with _kept_signal_handlers():
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
        """Return the rows of its dataset or of its eval_dataset."""
        build = self._env.build_eval_dataset if split == "eval" else self._env.build_dataset
        dataset = build()
        if dataset is None:
            return None
        size = len(dataset) if limit is None else min(limit, len(dataset))
        return [Row(_opening(row["prompt"]), row) for row in dataset.select(range(size)).to_list()]

    async def play(self, row: Row, speak: Speak) -> Outcome:
        """Run one rollout by the library's loop, scored by its rubric."""
        (output,) = await self._env.run_group([row.data], PolicyClient(speak), MODEL, {})
        if output["error"]:
            raise RuntimeError(f"the rollout ended in an error: {output['error']!r}")
        stop = _STOPS.get(output["stop_condition"] or "")
        # A single turn, or a last turn that was cut off, has the more precise stop reason.
        cut_off = output["is_truncated"] or getattr(self._env, "max_turns", 1) == 1
        return Outcome(
            reward=float(output["reward"]),
            rewards={name: float(value) for name, value in (output["metrics"] or {}).items()},
            stop_reason=None if stop is StopReason.MAX_TURNS and cut_off else stop,
        )


class PolicyClient(Client):
    """A `Client` of the library whose endpoint is the policy in training."""

    def __init__(self, speak: Speak) -> None:
        super().__init__(speak)

    def setup_client(self, config: object) -> object:
        raise AssertionError(f"made from a Speak, never from {config}")

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}

    async def to_native_prompt(self, messages: list[Any]) -> tuple[list[Message], dict[str, Any]]:
        return [plain_message(message) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[Message],
        model: str,  # noqa: ARG002 (there is one policy)
        sampling_args: dict[str, Any],  # noqa: ARG002 (the run's sampler decides)
        tools: list[dict[str, Any]] | None = None,
        **options: Any,  # noqa: ARG002
    ) -> Spoken:
        try:
            return await self.client(prompt, tools)
        except ContextFull as error:
            raise vf.OverlongPromptError(str(error)) from error

    async def raise_from_native_response(self, response: Spoken) -> None:
        """Accept every turn, because none of the policy's turns is an error."""

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
                tool_calls=[_library_call(call) for call in calls] or None,
                finish_reason=reason,
                is_truncated=response.cut_off,
            ),
        )

    async def close(self) -> None:
        """Do nothing, because the client holds no connection."""


def _library_call(call: Message) -> ToolCall:
    """Return a tool call in the library's flat form, with its arguments as JSON text."""
    function = call["function"]
    arguments = as_json_text(function["arguments"])
    return ToolCall(id=call["id"], name=function["name"], arguments=arguments)


def plain_message(message: Any) -> Message:
    """Return a message of the library as a plain dict in OpenAI form."""
    content = message.content
    if isinstance(content, list):
        content = [part if isinstance(part, dict) else part.model_dump() for part in content]
    plain: Message = {"role": message.role, "content": text_of(content)}
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


def _opening(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [user(prompt)]
    # Arrow gives each message all keys that any message has.
    return [{key: value for key, value in m.items() if value is not None} for m in prompt]


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Restore this process's signal handlers, because loading an environment replaces them."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
