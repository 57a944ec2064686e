"""The policy's side of a conversation: from messages to a prompt, from a completion to a message.

    open ---> Prompt ---> generate ---> Completion ---> message
                ^                                          |  the environment's reply
                `------------------ follow <---------------'

`RendererChat` renders here, token for token, and never re-renders what the policy sampled: the next
prompt is the last prompt, the completion as sampled, and the reply (`bridge_to_next_turn`). Where a
format cannot be extended like that, the conversation is rendered anew and the rollout forks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from renderers import ParsedToolCall, Renderer

from envs.messages import Message
from rl.client import Client, Completion
from rl.sampler import PolicySampler

ToolSpecs = list[dict[str, Any]]
_MISTAKES = {  # of a tool call, by the renderer's status
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}


@dataclass(frozen=True)
class Prompt:
    """What the engine is asked to go on from."""

    messages: list[Message]
    tools: ToolSpecs | None
    token_ids: list[int] = field(default_factory=list)


class Chat(Protocol):
    """One way of talking to an engine."""

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Return the first prompt of a conversation."""
        ...

    async def generate(self, prompt: Prompt, n: int) -> list[Completion]:
        """Return `n` completions."""
        ...

    def message(self, prompt: Prompt, done: Completion) -> Message:
        """Return what the completion says, tool calls parsed."""
        ...

    async def follow(
        self, prompt: Prompt, done: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Return the prompt after the reply to the completion, which says `message`."""
        ...

    def room(self, prompt: Prompt) -> int:
        """Return how many tokens may follow the prompt."""
        ...

    def full(self, done: Completion) -> bool:
        """Whether a completion that was cut off filled the whole context."""
        ...


@dataclass
class RendererChat:
    """Tokens in, tokens out. The default.

    Attributes:
        version: returns the newest policy version known to be live.

    """

    sampler: PolicySampler
    renderer: Renderer
    client: Client
    max_seq_len: int
    version: Callable[[], int]

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Render the opening messages."""
        return Prompt(messages, tools, render(self.renderer, messages, tools))

    async def generate(self, prompt: Prompt, n: int) -> list[Completion]:
        """Sample from the engine."""
        sampling = {**self.sampler.sampling(self.renderer), "max_tokens": self.room(prompt)}
        return await self.client.generate(prompt.token_ids, sampling, n=n, version=self.version())

    def message(self, prompt: Prompt, done: Completion) -> Message:
        """Parse the sampled tokens; calls that cannot be parsed keep their text and say why."""
        parsed = self.renderer.parse_response(
            done.token_ids, tools=cast("Any", prompt.tools), prompt_ids=prompt.token_ids
        )
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [_call(i, c) for i, c in enumerate(parsed.tool_calls)]
        return message

    async def follow(
        self, prompt: Prompt, done: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Extend the tokens so far; where the format forbids it, render everything anew."""
        messages = [*prompt.messages, message, *reply]
        bridged = self.renderer.bridge_to_next_turn(
            prompt.token_ids,
            done.token_ids,
            cast("list[Any]", reply),
            tools=cast("Any", prompt.tools),
        )
        if bridged is not None:
            return Prompt(messages, prompt.tools, bridged.token_ids)
        return Prompt(messages, prompt.tools, render(self.renderer, messages, prompt.tools))

    def room(self, prompt: Prompt) -> int:
        """The turn's limit, or what the row still holds."""
        return min(self.sampler.max_tokens, self.max_seq_len - len(prompt.token_ids))

    def full(self, done: Completion) -> bool:
        """Whether prompt and completion fill max_seq_len."""
        return len(done.prompt_ids) + len(done.token_ids) >= self.max_seq_len


def _call(index: int, parsed: ParsedToolCall) -> Message:
    call: Message = {"id": parsed.id or f"call_{index}", "type": "function"}
    if parsed.status == "ok":
        return call | {"function": {"name": parsed.name, "arguments": parsed.arguments}}
    mistake = _MISTAKES.get(parsed.status, str(parsed.status))
    function = {"name": parsed.name or "", "arguments": parsed.raw}
    return call | {"function": function, "error": mistake}


def render(
    renderer: Renderer, messages: list[Message], tools: ToolSpecs | None = None
) -> list[int]:
    """Return the prompt ids. Our messages are plain dicts, which `renderers` types more tightly."""
    return renderer.render_ids(
        cast("list[Any]", messages), tools=cast("Any", tools), add_generation_prompt=True
    )
