"""Renders prompts by the server's own chat template; completions are tokens.

    messages --/tokenize--> token ids --/inference/v1/generate--> tokens, logprobs, versions

vLLM's /v1/chat/completions returns token ids, too, but no policy version per token. Every turn is
rendered again, so a rollout stays one row only while the template repeats the sampled tokens
exactly. Otherwise the rollout forks (row_builder.py), so that only sampled tokens are trained.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from renderers import Renderer

from envs.messages import Message
from rl.inference.completion import Completion
from rl.model.tokenizer import parser
from rl.sampling.chat import ChatSetting, Prompt, ToolSpecs
from rl.sampling.clock import Seats
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.renderer_chat import RendererChat, vllm_client


@dataclass
class TokensChat(RendererChat):
    """The server renders; the renderer only parses.

    Attributes:
        on_rewrite: what to do if the template rewrites history; None: a single turn.

    """

    refusal: ClassVar[type[Exception]] = ValueError
    on_rewrite: Literal["fork", "refuse"] | None = None
    # One probe, shared with copies. Not in `connect`, because vLLM may still start, and does not
    # know an adapter before the first push.
    _probe: list[asyncio.Task[None]] = field(default_factory=list)

    async def ready(self) -> None:
        """Probe the server's template, once."""
        if self.on_rewrite is None:
            return
        if not self._probe:
            self._probe.append(asyncio.create_task(self._probed(self.on_rewrite)))
        await asyncio.shield(self._probe[0])  # a cancelled group must not cancel the probe

    async def _probed(self, on_rewrite: str) -> None:
        if await rewrites(self, self.renderer):
            choices = "fork or refuse; client=renderer client.on_rewrite=extend keeps it"
            report_rewriting(on_rewrite, choices)

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:  # noqa: ARG002
        """Return None, because vLLM may not be up yet."""
        return None

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        assert self.requests is not None, "only within group()"
        return Prompt(messages, tools, await self.requests.tokenize(messages, tools))

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Let the server render the conversation again."""
        return await self.rendered_again(prompt, completion, message, reply)


@dataclass(frozen=True, kw_only=True)
class TokensClient:
    """conf/client/tokens.yaml: the server's own chat template, then tokens in, tokens out."""

    needs_vllm: ClassVar[bool] = True
    measures_prompts: ClassVar[bool] = False
    on_rewrite: Literal["fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSetting) -> AsyncIterator[TokensChat]:
        """Open the connections; `TokensChat.ready` asks the server before the first group."""
        renderer: Renderer = parser(setting.model, setting.renderer)
        async with vllm_client(setting) as client:
            yield TokensChat(
                *(setting.sampler, renderer, client, setting.max_seq_len, setting.version),
                on_rewrite=self.on_rewrite if setting.has_turns else None,
                seats=Seats(setting.num_seqs),
            )
