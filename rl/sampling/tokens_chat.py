"""Chat client that lets vLLM render prompts with its own chat template.

    messages --/tokenize--> token ids --/inference/v1/generate--> tokens, logprobs, versions

vLLM's /v1/chat/completions is not used, because it returns no policy version per token. vLLM
renders the whole conversation again before every turn. The rollout stays one training row while
each prompt repeats the sampled tokens exactly. Otherwise the rollout forks (row_builder.py).
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
from rl.sampling.chat import ChatSettings, Prompt, ToolSpecs
from rl.sampling.clock import Seats
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.renderer_chat import RendererChat, vllm_client


@dataclass
class TokensChat(RendererChat):
    """A chat whose prompts vLLM renders and whose completions `renderer` parses.

    Attributes:
        on_rewrite: reaction if the chat template rewrites history; None: there is only one turn.
    """

    refusal: ClassVar[type[Exception]] = ValueError
    on_rewrite: Literal["fork", "refuse"] | None = None
    # The task that tests the template, shared with copies. `connect` cannot start the task, because
    # vLLM may still be starting, and has no adapter before the first push.
    _probe: list[asyncio.Task[None]] = field(default_factory=list)

    async def ready(self) -> None:
        """Test once whether the server's chat template rewrites history."""
        if self.on_rewrite is None:
            return
        if not self._probe:
            self._probe.append(asyncio.create_task(self._test_template(self.on_rewrite)))
        await asyncio.shield(self._probe[0])  # cancelling a group must not cancel the test

    async def _test_template(self, on_rewrite: str) -> None:
        if await rewrites(self, self.renderer):
            choices = "fork or refuse; client=renderer client.on_rewrite=extend keeps thinking"
            report_rewriting(on_rewrite, choices)

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:  # noqa: ARG002
        """Return None, because only vLLM can count the tokens, and vLLM may not run yet."""
        return None

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        assert self.requests is not None, "only within group()"
        return Prompt(messages, tools, await self.requests.tokenize(messages, tools))

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Let the server render the whole conversation again."""
        return await self.rendered_again(prompt, completion, message, reply)


@dataclass(frozen=True, kw_only=True)
class TokensClient:
    """The tokens client: vLLM renders prompts and returns tokens (conf/client/tokens.yaml)."""

    needs_vllm: ClassVar[bool] = True
    measures_prompts: ClassVar[bool] = False
    on_rewrite: Literal["fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSettings) -> AsyncIterator[TokensChat]:
        """Open the connections to vLLM; `TokensChat.ready` tests the chat template later."""
        renderer: Renderer = parser(setting.model, setting.renderer)
        async with vllm_client(setting) as client:
            yield TokensChat(
                *(setting.sampler, renderer, client, setting.max_seq_len, setting.version),
                on_rewrite=self.on_rewrite if setting.has_turns else None,
                seats=Seats(setting.num_seqs),
            )
