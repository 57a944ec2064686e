"""The policy's side of a conversation: from messages to a prompt, from a completion to a message.

    open ---> Prompt ---> generate ---> Completion ---> message
                ^                                          |  the environment's reply
                `------------------ follow <---------------'

`RendererChat` renders here, token for token, and never re-renders what the policy sampled: the next
prompt is the last prompt, the completion as sampled, and the reply (`bridge_to_next_turn`). Where a
format cannot be extended like that, the conversation is rendered anew and the rollout forks.
"""

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from envs.messages import Message
from rl.inference.client import RequestTally
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.sampling.clock import Seats
from rl.sampling.sampler import PolicySampler

ToolSpecs = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """What the server is asked to go on from."""

    messages: list[Message]
    tools: ToolSpecs | None
    token_ids: list[int] = field(default_factory=list)


class Chat(Protocol):
    """One way of talking to a server."""

    async def ready(self) -> None:
        """Find out what only the server can tell, once: called before each group is played.

        Raises:
            ValueError: client.on_rewrite=refuse, and history would be rewritten.

        """
        ...

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:
        """Return how many tokens a first prompt has; None where only the server can tell."""
        ...

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Return the first prompt of a conversation."""
        ...

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        """Return `n` completions, drawn with `seed`, `seed` + 1, ...; None: as the server likes."""
        ...

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Return what the completion says before its stop text, tool calls parsed."""
        ...

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Return the prompt after the reply to the completion, which says `message`."""
        ...

    def room(self, prompt: Prompt) -> int:
        """Return how many tokens may follow the prompt."""
        ...

    def shares(self, prompt: Prompt) -> bool:
        """Whether a group's completions of the prompt come faster in one request, at no risk."""
        ...

    @property
    def seats(self) -> Seats:
        """As many completions as the server samples at once."""
        ...

    def full(self, completion: Completion) -> bool:
        """Whether a completion that was cut off filled the whole context."""
        ...

    def group(self) -> AbstractContextManager["Chat"]:
        """Return the same chat for the rollouts of a group: one replica answers all of them."""
        ...

    def asking(self, sampler: PolicySampler) -> "Chat":
        """Return the same chat with another sampler."""
        ...

    def pinned(self, sampler: PolicySampler, version: int) -> "Chat":
        """Return the same chat with another sampler, for as long as `version` is the live one."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatSetting:
    """What the rest of the run decides.

    Attributes:
        has_turns: the environment's; history can be rewritten only in a second turn.
        num_seqs: completions that the server samples at once; None: not known.
        version: the newest policy version known to be live; the probe of a chat may wait for it.
        router: to our vLLMs, shared with whoever says which of them have the live weights.
        served_as: the name that it knows the policy by.
        model: local folder with the tokenizer.
        renderer: name of the chat format's family, or auto.
        tally: counts the requests that failed; shared with whoever logs it.

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


class ChatClient(Protocol):
    """One choice of conf/client."""

    needs_vllm: ClassVar[bool]  # tokens, by a vLLM of the run

    def connect(self, setting: ChatSetting) -> AbstractAsyncContextManager[Chat]:
        """Return the chat, for as long as the block lasts."""
        ...
