"""The policy's side of a conversation: messages become a prompt, a completion a message.

    open ---> Prompt ---> generate ---> Completion ---> message
                ^                                          |  the environment's reply
                `------------------ follow <---------------'

`RendererChat` renders tokens in this process and never renders sampled text again: the next prompt
is the last prompt, the sampled completion and the reply (`bridge_to_next_turn`). If a format cannot
be extended like that, the whole conversation is rendered again and the rollout forks.
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
    """What the server continues."""

    messages: list[Message]
    tools: ToolSpecs | None
    token_ids: list[int] = field(default_factory=list)


class Chat(Protocol):
    """A way to talk to a server."""

    async def ready(self) -> None:
        """Ask the server once for what only it knows; called before each group is played.

        Raises:
            ValueError: client.on_rewrite=refuse, and history would be rewritten.

        """
        ...

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:
        """Return how many tokens a first prompt has; None if only the server knows."""
        ...

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Return the first prompt of a conversation."""
        ...

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        """Return `n` completions, drawn with `seed`, `seed` + 1, ...; None: without seeds."""
        ...

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Return the completion up to its stop text as a message, with parsed tool calls."""
        ...

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Return the prompt after the reply to `message`, which is the completion as a message."""
        ...

    def room(self, prompt: Prompt) -> int:
        """Return how many tokens may follow the prompt."""
        ...

    def shares(self, prompt: Prompt) -> bool:
        """Return whether one request for all completions of a group is faster and safe."""
        ...

    @property
    def seats(self) -> Seats:
        """The limit on completions that the server samples at once."""
        ...

    def full(self, completion: Completion) -> bool:
        """Return whether a completion that was cut off filled the whole context."""
        ...

    def group(self) -> AbstractContextManager["Chat"]:
        """Return the same chat for the rollouts of a group, which one replica answers."""
        ...

    def asking(self, sampler: PolicySampler) -> "Chat":
        """Return the same chat with another sampler."""
        ...

    def pinned(self, sampler: PolicySampler, version: int) -> "Chat":
        """Return the same chat with another sampler, for requests of `version` only."""
        ...


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


class ChatClient(Protocol):
    """One choice of conf/client."""

    needs_vllm: ClassVar[bool]  # whether it needs a vLLM of the run

    def connect(self, setting: ChatSetting) -> AbstractAsyncContextManager[Chat]:
        """Return a context manager that opens the chat."""
        ...
