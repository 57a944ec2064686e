"""conf/client: how we talk to whoever serves the policy, and what becomes of rewritten history.

    renderer   messages -> tokens here (`renderers`), tokens to our vLLM      the default
    tokens     messages -> tokens by the server's own chat template, tokens to our vLLM
    messages   words to any OpenAI-compatible server: evaluation only (rl/messages_chat.py)

Some chat formats drop the thinking of earlier turns (Qwen3, DeepSeek-R1): the prompt of turn two
then does not begin with the tokens of turn one, and a rollout becomes several training rows. It is
found out at the start, by a probe, and `on_rewrite` says what to do.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from renderers import Renderer

from rl.chat import Chat, RendererChat
from rl.client import TokenClient
from rl.rewriting import rewrites
from rl.sampler import PolicySampler
from rl.tokenizer import load_renderer
from rl.tokens_chat import TokensChat, parser

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the rest of the run decides.

    Attributes:
        max_turns: of the environment; history can be rewritten only in a second turn.
        version: returns the newest policy version known to be live.
        socket: where our vLLM listens.
        served_as: the name that it knows the policy by.
        model: local folder with the tokenizer.
        renderer: name of the chat format's family, or auto.

    """

    sampler: PolicySampler
    max_seq_len: int
    max_turns: int
    version: Callable[[], int]
    socket: Path
    served_as: str
    model: Path
    renderer: str


class ChatClient(Protocol):
    """One choice of conf/client."""

    ours: ClassVar[bool]  # it needs a vLLM of ours

    def connect(self, setting: Setting) -> AbstractAsyncContextManager[Chat]:
        """Return the chat, for as long as the block lasts."""
        ...


@dataclass(frozen=True, kw_only=True)
class RendererClient:
    """conf/client/renderer.yaml: tokens in, tokens out, rendered here."""

    ours: ClassVar[bool] = True
    on_rewrite: Literal["extend", "fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: Setting) -> AsyncIterator[RendererChat]:
        """Load the renderer and open the connections.

        Raises:
            ValueError: history would be rewritten, and on_rewrite=refuse.

        """
        renderer = load_renderer(setting.model, setting.renderer)
        async with _tokens(setting) as client:
            chat = RendererChat(
                setting.sampler, renderer, client, setting.max_seq_len, setting.version
            )
            if setting.max_turns > 1 and await rewrites(chat, renderer):
                choices = "extend (keep it, one row), fork (drop it as the format does) or refuse"
                _tell(self.on_rewrite, choices)
                if self.on_rewrite == "extend":
                    await self._keep_thinking(chat, setting)
            yield chat

    async def _keep_thinking(self, chat: RendererChat, setting: Setting) -> None:
        chat.renderer = load_renderer(setting.model, setting.renderer, keep_thinking=True)
        if await rewrites(chat, chat.renderer):
            raise ValueError(
                f"client.on_rewrite=extend, but the chat format {setting.renderer!r} cannot keep "
                "thinking from earlier turns: choose fork"
            )


@dataclass(frozen=True, kw_only=True)
class TokensClient:
    """conf/client/tokens.yaml: the server's own chat template, then tokens in, tokens out."""

    ours: ClassVar[bool] = True
    on_rewrite: Literal["fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: Setting) -> AsyncIterator[TokensChat]:
        """Open the connections and probe the server's template (see RendererClient.connect)."""
        renderer: Renderer = parser(setting.model, setting.renderer)
        async with _tokens(setting) as client:
            chat = TokensChat(
                setting.sampler, renderer, client, setting.max_seq_len, setting.version
            )
            if setting.max_turns > 1 and await rewrites(chat, renderer):
                choices = "fork or refuse; client=renderer client.on_rewrite=extend keeps it"
                _tell(self.on_rewrite, choices)
            yield chat


def _tokens(setting: Setting) -> TokenClient:
    timeout = setting.sampler.rollout_timeout
    return TokenClient(setting.socket, model=setting.served_as, timeout=timeout)


def _tell(chosen: str, choices: str) -> None:
    found = "this chat format drops thinking from earlier turns, so later prompts rewrite history"
    if chosen == "refuse":
        raise ValueError(f"{found}, and client.on_rewrite=refuse: choose {choices}")
    log.warning("%s: client.on_rewrite=%s (choices: %s)", found, chosen, choices)
