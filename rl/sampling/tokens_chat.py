"""Prompts by the server's own chat template; completions as tokens all the same.

    messages --/tokenize--> token ids --/inference/v1/generate--> tokens, logprobs, versions

vLLM's /v1/chat/completions would give token ids too, but no policy version per token. Every turn is
rendered anew, so a rollout stays one row only while the template repeats what was sampled exactly;
where it does not, the rollout forks (rows.py) and nothing is trained that was not sampled.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

from renderers import Renderer

from envs.messages import Message
from rl.inference.client import Completion, VLLMClient
from rl.model.tokenizer import parser
from rl.sampling.chat import ChatSetting, Prompt, ToolSpecs
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.renderer_chat import RendererChat, vllm_client


@dataclass
class TokensChat(RendererChat):
    """The server renders; the renderer only parses."""

    client: VLLMClient  # pyright: ignore[reportIncompatibleVariableOverride] it is set once

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Let the server render the opening messages."""
        return Prompt(messages, tools, await self.client.tokenize(messages, tools))

    async def follow(
        self,
        prompt: Prompt,
        done: Completion,  # noqa: ARG002 rendered anew, not extended
        message: Message,
        reply: list[Message],
    ) -> Prompt:
        """Let the server render the conversation anew."""
        messages = [*prompt.messages, message, *reply]
        return await self.open(messages, prompt.tools)


@dataclass(frozen=True, kw_only=True)
class TokensClient:
    """conf/client/tokens.yaml: the server's own chat template, then tokens in, tokens out."""

    needs_vllm: ClassVar[bool] = True
    on_rewrite: Literal["fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSetting) -> AsyncIterator[TokensChat]:
        """Open the connections and probe the server's template (see RendererClient.connect)."""
        renderer: Renderer = parser(setting.model, setting.renderer)
        async with vllm_client(setting) as client:
            chat = TokensChat(
                setting.sampler, renderer, client, setting.max_seq_len, setting.version
            )
            if setting.max_turns > 1 and await rewrites(chat, renderer):
                choices = "fork or refuse; client=renderer client.on_rewrite=extend keeps it"
                report_rewriting(self.on_rewrite, choices)
            yield chat
