"""Prompts by the server's own chat template; completions as tokens all the same.

    messages --/tokenize--> token ids --/inference/v1/generate--> tokens, logprobs, versions

vLLM's /v1/chat/completions would give token ids too, but no policy version per token. Every turn is
rendered anew, so a rollout stays one row only while the template repeats what was sampled exactly;
where it does not, the rollout forks (rows.py) and nothing is trained that was not sampled.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from renderers import Renderer

from envs.messages import Message, assistant, well_formed
from rl.inference.client import GroupClient, VLLMClient
from rl.inference.completion import Completion
from rl.model.tokenizer import decoded, parser
from rl.sampling.chat import ChatSetting, Prompt, ToolSpecs
from rl.sampling.clock import Seats
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.renderer_chat import RendererChat, vllm_client


@dataclass
class TokensChat(RendererChat):
    """The server renders; the renderer only parses.

    Attributes:
        on_rewrite: what to do where the template rewrites history; None: it has no occasion to.

    """

    client: VLLMClient | GroupClient  # pyright: ignore[reportIncompatibleVariableOverride] it is set once
    on_rewrite: Literal["fork", "refuse"] | None = None
    # Of the template: one, shared with copies. Not at `connect`: vLLM is not up yet, and knows no
    # adapter's name before the first push.
    _probe: list[asyncio.Task[None]] = field(default_factory=list)

    async def ready(self) -> None:
        """Probe the server's template, once."""
        if self.on_rewrite is not None:
            if not self._probe:
                self._probe.append(asyncio.create_task(self._probed(self.on_rewrite)))
            await asyncio.shield(self._probe[0])  # one group that is given up is not all of them

    async def _probed(self, on_rewrite: str) -> None:
        if await rewrites(self, self.renderer):
            choices = "fork or refuse; client=renderer client.on_rewrite=extend keeps it"
            report_rewriting(on_rewrite, choices)

    def measure(
        self,
        messages: list[Message],  # noqa: ARG002
        tools: ToolSpecs | None,  # noqa: ARG002
    ) -> int | None:
        """Not before vLLM is up."""
        return None

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Let the server render the opening messages."""
        return Prompt(messages, tools, await self.client.tokenize(messages, tools))

    async def follow(
        self,
        prompt: Prompt,
        completion: Completion,
        message: Message,
        reply: list[Message],
    ) -> Prompt:
        """Let the server render the conversation anew."""
        try:
            spoken = self.sampled(prompt, completion, message)
            return await self.open([*prompt.messages, spoken, *reply], prompt.tools)
        except ValueError:  # the template may have no form for what the policy wrote
            text = assistant(well_formed(decoded(self.renderer, completion.token_ids)))
            # What is refused now is the reply's fault.
            return await self.open([*prompt.messages, text, *reply], prompt.tools)


@dataclass(frozen=True, kw_only=True)
class TokensClient:
    """conf/client/tokens.yaml: the server's own chat template, then tokens in, tokens out."""

    needs_vllm: ClassVar[bool] = True
    measures_prompts: ClassVar[bool] = False
    on_rewrite: Literal["fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSetting) -> AsyncIterator[TokensChat]:
        """Open the connections; nothing is asked before the first group (`TokensChat.ready`)."""
        renderer: Renderer = parser(setting.model, setting.renderer)
        async with vllm_client(setting) as client:
            on_rewrite = self.on_rewrite if setting.has_turns else None
            seats = Seats(setting.num_seqs)
            yield TokensChat(
                *(setting.sampler, renderer, client, setting.max_seq_len, setting.version, seats),
                on_rewrite,
            )
