"""Base class of chats. A chat turns messages into prompts, and completions into messages.

first_prompt ---> Prompt ---> generate ---> Completion ---> message
                    ^                                          |  the environment's reply
                    `--------------- next_prompt <-------------'
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from envs.episode import StopReason
from envs.messages import Message, clean_json, replace_surrogates
from rl.inference.client import RequestTally
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.sampling.clock import CompletionSlots
from rl.sampling.sampler import PolicySampler

ToolSpecs = list[dict[str, Any]]
_MAX_NAME_LENGTH = 200  # maximum number of characters of a tool call's name or id


@dataclass(frozen=True)
class Prompt:
    """The input of a turn: messages and tools. A chat that sends tokens also sets `token_ids`."""

    messages: list[Message]
    tools: ToolSpecs | None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Chat:
    """Base class of chats, which sample completions. Copies of a chat share its `slots`."""

    sampler: PolicySampler
    slots: CompletionSlots = field(default_factory=CompletionSlots, kw_only=True)

    async def check_server(self) -> None:
        """Run checks that need a running server. The player calls this before every group."""

    def num_prompt_tokens(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:  # noqa: ARG002
        """Return the number of tokens of a first prompt; None if only the server can count them."""
        return None

    async def first_prompt(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        raise NotImplementedError

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        """Return `n` completions. If `seed` is set, completion i gets the seed `seed` + i."""
        raise NotImplementedError

    def encode(self, text: str | Sequence[int]) -> list[int]:  # noqa: ARG002
        """Return the tokens of `text`, which may already be a list of tokens."""
        raise ValueError(
            "`prefix` and the logprobs of a text need a client that sends tokens, but this client "
            "sends text: use client=renderer"
        )

    async def score(self, token_ids: list[int], count: int) -> tuple[list[float], int]:
        """Return the policy's logprobs of the last `count` tokens, and the policy's version."""
        raise NotImplementedError

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Parse the completion, without its stop text, into a message with tool calls."""
        raise NotImplementedError

    async def next_prompt(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Return `prompt` extended by `completion` (parsed into `message`) and by `reply`."""
        raise NotImplementedError

    def max_new_tokens(self, prompt: Prompt) -> int:  # noqa: ARG002
        """Return the maximum number of tokens of the next completion."""
        return self.sampler.max_tokens

    def shares_request(self, prompt: Prompt) -> bool:  # noqa: ARG002
        """Return whether one request should sample the completions of all rollouts of a group."""
        return False

    def fills_context(self, completion: Completion) -> bool:
        """Return whether a cut-off completion ended because the context was full."""
        raise NotImplementedError

    def stop_reason(self, completion: Completion) -> StopReason:
        if not completion.cut_off:
            return StopReason.STOP
        return StopReason.CONTEXT if self.fills_context(completion) else StopReason.MAX_TOKENS

    def group(self) -> AbstractContextManager[Self]:
        """Return a context manager that yields a chat whose requests all go to one vLLM replica."""
        return nullcontext(self)


def checked_call(call_id: object, name: object, arguments: Any, raw: str) -> Message:
    """Return an entry of `tool_calls`. An invalid call gets an `error`, and `raw` as arguments."""
    if not isinstance(name, str) or not name:
        return invalid_call(call_id, raw, "the tool call has no name")
    if len(name) > _MAX_NAME_LENGTH:
        return invalid_call(call_id, raw, "the tool call's name is too long")
    try:
        function = {"name": replace_surrogates(name), "arguments": clean_json(arguments)}
    except ValueError as error:
        return invalid_call(call_id, raw, f"the arguments cannot be used: {error}", name)
    return {"id": _short_text(call_id), "type": "function", "function": function}


def invalid_call(call_id: object, raw: str, mistake: str, name: object = None) -> Message:
    function = {"name": _short_text(name), "arguments": replace_surrogates(raw)}
    return {"id": _short_text(call_id), "type": "function", "function": function, "error": mistake}


def _short_text(value: object) -> str:
    return replace_surrogates(value)[:_MAX_NAME_LENGTH] if isinstance(value, str) else ""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings of a run that a client needs to open a chat."""

    sampler: PolicySampler
    max_seq_len: int
    is_multi_turn: bool  # whether episodes may have several turns
    version: LiveVersion  # the policy version that vLLM has loaded
    router: Router  # chooses the vLLM replica of a request
    served_as: str  # model name in requests to vLLM
    model: Path  # local folder with the tokenizer
    renderer: str  # name of the chat format in the library `renderers`, or auto
    renderer_options: Mapping[str, Any] | None = None  # options of the renderer or chat template
    num_seqs: int | None = None  # completions that all vLLMs can sample at once; None: unknown
    tally: RequestTally = field(default_factory=RequestTally)
