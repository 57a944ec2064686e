"""Chat client for any OpenAI-compatible server, for evaluation and prompt search.

The client sends one request per completion, because some servers do not support the parameter `n`.
The server returns no token ids, so its completions cannot be trained on.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from envs.chat_endpoint import ChatEndpoint
from envs.http_client import HttpClient
from envs.messages import Message, assistant, to_api_format
from rl.inference.completion import Completion, GenerationError
from rl.sampling.chat import Chat, ChatSettings, Prompt, ToolSpecs, checked_call, invalid_call


@dataclass(frozen=True, kw_only=True)
class MessageCompletion(Completion):
    """A completion that the server returned as a message."""

    message: Message = field(default_factory=dict)  # parsed by the server
    too_long: bool = False  # whether the server refused the conversation as too long


@dataclass(frozen=True, kw_only=True)
class MessagesClient(ChatEndpoint):
    """The client of conf/client/messages.yaml, which explains the options."""

    needs_vllm: ClassVar[bool] = False
    option: ClassVar[str] = "client.url"
    raises: ClassVar[type[Exception]] = GenerationError

    api_key_variable: str

    @asynccontextmanager
    async def connect(self, setting: ChatSettings) -> AsyncIterator["MessagesChat"]:
        sampler = setting.sampler
        async with self.client(
            max_concurrent=sampler.max_concurrent, timeout=sampler.rollout_timeout
        ) as client:
            yield MessagesChat(sampler, self, client)


@dataclass
class MessagesChat(Chat):
    """A chat that sends text, not tokens. `client`, not `slots`, limits concurrent requests."""

    endpoint: MessagesClient
    client: HttpClient

    async def first_prompt(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        return Prompt(messages, tools)

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        body: dict[str, Any] = {
            "messages": [to_api_format(m, "reasoning_content") for m in prompt.messages],
            "max_tokens": self.sampler.max_tokens,
            **self.sampler.non_default_parameters(),
        }
        if prompt.tools:
            body["tools"] = [{"type": "function", "function": spec} for spec in prompt.tools]
        seeds = [{} if seed is None else {"seed": seed + i} for i in range(n)]
        return [*await asyncio.gather(*(self._request_message(body | one) for one in seeds))]

    def message(self, prompt: Prompt, completion: Completion) -> Message:  # noqa: ARG002
        """Return the message of the server's answer. The server has removed the stop text."""
        assert isinstance(completion, MessageCompletion)
        return completion.message

    async def next_prompt(
        self,
        prompt: Prompt,
        completion: Completion,  # noqa: ARG002
        message: Message,
        reply: list[Message],
    ) -> Prompt:
        return Prompt([*prompt.messages, message, *reply], prompt.tools)

    def fills_context(self, completion: Completion) -> bool:
        return isinstance(completion, MessageCompletion) and completion.too_long

    async def _request_message(self, body: dict[str, Any]) -> MessageCompletion:
        answer = await self.endpoint.ask(self.client, **body)
        if answer is None:
            return MessageCompletion([], [], [], cut_off=True, message=assistant(""), too_long=True)
        choice, usage = answer.choices[0], answer.usage
        reply = choice.message
        message = assistant(reply.content or "")
        if thought := reply.reasoning_content or reply.reasoning:
            message["reasoning_content"] = thought
        if reply.tool_calls:
            message["tool_calls"] = [_tool_call(i, c) for i, c in enumerate(reply.tool_calls)]
        return MessageCompletion(
            token_ids=[],
            logprobs=[],
            versions=[],
            cut_off=choice.finish_reason == "length",
            num_untracked_tokens=(usage and usage.completion_tokens) or 0,
            message=message,
        )


def _tool_call(index: int, call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return invalid_call(f"call_{index}", json.dumps(call), "the tool call is malformed")
    call_id, arguments = call.get("id") or f"call_{index}", function.get("arguments") or {}
    return checked_call(call_id, function.get("name"), arguments, json.dumps(function))
