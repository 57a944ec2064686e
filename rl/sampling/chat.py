"""Base class of chats, which convert messages to prompts and completions to messages.

    open ---> Prompt ---> generate ---> Completion ---> message
                ^                                          |  the environment's reply
                `------------------ follow <---------------'

`RendererChat` renders tokens in this process and never renders sampled text again. The next prompt
is the last prompt, the sampled completion and the reply (`bridge_to_next_turn`). If a chat format
does not allow this, the whole conversation is rendered again and the rollout forks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from envs.episode import Example, StopReason
from envs.messages import Message, plain_json, well_formed
from envs.protocol import Environment
from rl.inference.client import RequestTally
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.sampling.clock import Seats
from rl.sampling.environment_errors import as_environment_error
from rl.sampling.sampler import PolicySampler

ToolSpecs = list[dict[str, Any]]
_MAX_NAME_LENGTH = 200  # maximum length of a tool call's name or id


@dataclass(frozen=True)
class Prompt:
    """A conversation with its tools, and its token ids if the chat sends tokens."""

    messages: list[Message]
    tools: ToolSpecs | None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Chat:
    """Base class of chats, which sample completions from a server.

    Attributes:
        seats: the limit on concurrent completions of the server, shared by copies of the chat.
    """

    sampler: PolicySampler
    seats: Seats = field(default_factory=Seats, kw_only=True)

    async def ready(self) -> None:
        """Run checks that need a running server; called before each group is played.

        Raises:
            ValueError: client.on_rewrite=refuse, and the chat format rewrites history.
        """

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:  # noqa: ARG002
        """Return the number of tokens of a first prompt; None if only the server can count."""
        return None

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Return the first prompt of a conversation."""
        raise NotImplementedError

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        """Return `n` completions with seeds `seed`, `seed` + 1, ...; None: no seeds."""
        raise NotImplementedError

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Return the completion up to its stop text as a message, with parsed tool calls."""
        raise NotImplementedError

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Return the next prompt: `prompt`, the completion (parsed as `message`) and the reply."""
        raise NotImplementedError

    def max_new_tokens(self, prompt: Prompt) -> int:  # noqa: ARG002
        """Return the maximum number of tokens of the next completion."""
        return self.sampler.max_tokens

    def shares_request(self, prompt: Prompt) -> bool:  # noqa: ARG002
        """Return whether a group should sample all its completions with one request."""
        return False

    def fills_context(self, completion: Completion) -> bool:
        """Return whether a completion that was cut off filled the whole context."""
        raise NotImplementedError

    def stop_reason(self, completion: Completion) -> StopReason:
        """Return the reason why the policy's turn ended."""
        if not completion.cut_off:
            return StopReason.STOP
        return StopReason.CONTEXT if self.fills_context(completion) else StopReason.MAX_TOKENS

    def group(self) -> AbstractContextManager[Self]:
        """Return a context manager whose chat sends all requests of a group to one replica."""
        return nullcontext(self)

    def with_sampler(self, sampler: PolicySampler) -> Self:
        """Return a copy of the chat that uses `sampler`."""
        return replace(self, sampler=sampler)

    def pinned(self, sampler: PolicySampler, version: int) -> Self:  # noqa: ARG002
        """Return a copy with `sampler` that uses the prefix cache of policy `version`."""
        return self.with_sampler(sampler)


def checked_call(call_id: object, name: object, arguments: Any, raw: str) -> Message:
    """Return an entry of `tool_calls` with a valid name and plain JSON arguments.

    An invalid call gets an `error`, which the environment returns to the policy. Its arguments are
    then `raw`, the text that the policy wrote.
    """
    if not isinstance(name, str) or not name:
        return invalid_call(call_id, raw, "the tool call has no name")
    if len(name) > _MAX_NAME_LENGTH:
        return invalid_call(call_id, raw, "the tool call's name is too long")
    try:
        function = {"name": well_formed(name), "arguments": plain_json(arguments)}
    except ValueError as error:
        return invalid_call(call_id, raw, f"the arguments cannot be used: {error}", name)
    return {"id": _text(call_id), "type": "function", "function": function}


def invalid_call(call_id: object, raw: str, mistake: str, name: object = None) -> Message:
    """Return an entry of `tool_calls` for an invalid call, with `mistake` as its error."""
    function = {"name": _text(name), "arguments": well_formed(raw)}
    return {"id": _text(call_id), "type": "function", "function": function, "error": mistake}


def _text(value: object) -> str:
    return well_formed(value)[:_MAX_NAME_LENGTH] if isinstance(value, str) else ""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings of a run that a client needs to open a chat.

    Attributes:
        has_turns: whether the environment has several turns, so that history can be rewritten.
        num_seqs: maximum number of concurrent completions of the server; None: unknown.
        version: the newest policy version with which vLLM samples; it selects the prefix cache.
        router: router to the run's vLLM replicas, shared with ServingReplicas.
        served_as: name of the policy in vLLM.
        model: local folder with the tokenizer.
        renderer: name of the renderer family of the chat format, or auto.
        tally: counter of failed requests, for the metrics.
    """

    sampler: PolicySampler
    max_seq_len: int
    has_turns: bool
    version: LiveVersion
    router: Router
    served_as: str
    model: Path
    renderer: str
    num_seqs: int | None = None
    tally: RequestTally = field(default_factory=RequestTally)


@dataclass
class Hints:
    """Renderer of hinted prompts for one group's rollouts, if the reference model sees hints.

    A row begins with a prompt and continues with the policy's tokens and the environment's replies.
    The reference computes the logprobs of the same tokens after a prompt that contains the hint.
    """

    chat: Chat
    env: Environment
    example: Example
    # The newest prompt is cached, because the rollouts of a group share their first prompt.
    _newest: tuple[Prompt, list[int]] | None = None

    async def __call__(self, prompt: Prompt) -> list[int]:
        """Return the tokens of the hinted prompt that replaces `prompt` at the start of a row."""
        if self._newest is None or self._newest[0] is not prompt:
            with as_environment_error(self.env, "teacher_messages"):
                messages = self.env.teacher_messages(self.example, list(prompt.messages))
                hinted = await self.chat.open(messages, prompt.tools)
            self._newest = prompt, hinted.token_ids
        return self._newest[1]
