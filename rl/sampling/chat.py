"""The policy's side of a conversation: messages become a prompt, a completion a message.

    open ---> Prompt ---> generate ---> Completion ---> message
                ^                                          |  the environment's reply
                `------------------ follow <---------------'

`RendererChat` renders tokens in this process and never renders sampled text again: the next prompt
is the last prompt, the sampled completion and the reply (`bridge_to_next_turn`). If a format cannot
be extended like that, the whole conversation is rendered again and the rollout forks.
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
_LONGEST_NAME = 200  # characters


@dataclass(frozen=True)
class Prompt:
    """What the server continues."""

    messages: list[Message]
    tools: ToolSpecs | None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Chat:
    """Base class of ways to talk to a server.

    Attributes:
        seats: the limit on completions that the server samples at once; copies share it.

    """

    sampler: PolicySampler
    seats: Seats = field(default_factory=Seats, kw_only=True)

    async def ready(self) -> None:
        """Ask the server once for what only it knows; called before each group is played.

        Raises:
            ValueError: client.on_rewrite=refuse, and history would be rewritten.

        """

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:  # noqa: ARG002
        """Return how many tokens a first prompt has; None if only the server knows."""
        return None

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Return the first prompt of a conversation."""
        raise NotImplementedError

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        """Return `n` completions, drawn with `seed`, `seed` + 1, ...; None: without seeds."""
        raise NotImplementedError

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Return the completion up to its stop text as a message, with parsed tool calls."""
        raise NotImplementedError

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Return the prompt after the reply to `message`, which is the completion as a message."""
        raise NotImplementedError

    def room(self, prompt: Prompt) -> int:  # noqa: ARG002
        """Return how many tokens may follow the prompt."""
        return self.sampler.max_tokens

    def shares(self, prompt: Prompt) -> bool:  # noqa: ARG002
        """Return whether one request for all completions of a group is faster and safe."""
        return False

    def full(self, completion: Completion) -> bool:
        """Return whether a completion that was cut off filled the whole context."""
        raise NotImplementedError

    def ending(self, completion: Completion) -> StopReason:
        """Return why the policy's turn ended."""
        if not completion.cut_off:
            return StopReason.STOP
        return StopReason.CONTEXT if self.full(completion) else StopReason.MAX_TOKENS

    def group(self) -> AbstractContextManager[Self]:
        """Return the same chat for the rollouts of a group, which one replica answers."""
        return nullcontext(self)

    def asking(self, sampler: PolicySampler) -> Self:
        """Return the same chat with another sampler."""
        return replace(self, sampler=sampler)

    def pinned(self, sampler: PolicySampler, version: int) -> Self:  # noqa: ARG002
        """Return the same chat with another sampler, for requests of `version` only."""
        return self.asking(sampler)


def checked_call(call_id: object, name: object, arguments: Any, raw: str) -> Message:
    """Return an entry of `tool_calls`: its name is text, its arguments are plain JSON or its text.

    A call without this form gets an `error`, which the environment answers with, and `raw`, the
    text that the policy wrote, as arguments.
    """
    if not isinstance(name, str) or not name:
        return mistaken_call(call_id, raw, "the tool call has no name")
    if len(name) > _LONGEST_NAME:
        return mistaken_call(call_id, raw, "the tool call's name is too long")
    try:
        function = {"name": well_formed(name), "arguments": plain_json(arguments)}
    except ValueError as error:
        return mistaken_call(call_id, raw, f"the arguments cannot be used: {error}", name)
    return {"id": _text(call_id), "type": "function", "function": function}


def mistaken_call(call_id: object, raw: str, mistake: str, name: object = None) -> Message:
    """Return a call with an error."""
    function = {"name": _text(name), "arguments": well_formed(raw)}
    return {"id": _text(call_id), "type": "function", "function": function, "error": mistake}


def _text(value: object) -> str:
    return well_formed(value)[:_LONGEST_NAME] if isinstance(value, str) else ""


@dataclass(frozen=True, kw_only=True)
class ChatSetting:
    """What the rest of the run decides.

    Attributes:
        has_turns: whether the environment has several turns, so that history can be rewritten.
        num_seqs: completions that the server samples at once; None: unknown.
        version: the newest policy version that vLLM samples with; a chat may wait for it.
        router: to the vLLMs of the run, shared with ServingReplicas.
        served_as: name of the policy in vLLM.
        model: local folder with the tokenizer.
        renderer: name of the chat format's family, or auto.
        tally: counts failed requests, for the metrics.

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
    """Renders the hinted prompts of one group's rollouts, for a reference with `sees_hint`.

    A row begins with a prompt and continues with the policy's tokens and the environment's replies.
    The reference scores the same tokens after another prompt, which holds the hint.
    """

    chat: Chat
    env: Environment
    example: Example
    # Cached, because the rollouts of a group share their first prompt.
    _newest: tuple[Prompt, list[int]] | None = None

    async def __call__(self, prompt: Prompt) -> list[int]:
        """Return the tokens of the hinted prompt for a prompt that begins a row."""
        if self._newest is None or self._newest[0] is not prompt:
            with as_environment_error(self.env, "teacher_messages"):
                messages = self.env.teacher_messages(self.example, list(prompt.messages))
                hinted = await self.chat.open(messages, prompt.tools)
            self._newest = prompt, hinted.token_ids
        return self._newest[1]
