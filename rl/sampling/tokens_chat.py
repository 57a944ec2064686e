"""Chat client for which vLLM renders the prompts with the model's chat template.

    messages --/tokenize--> token ids --/inference/v1/generate--> tokens, logprobs, versions

vLLM's /v1/chat/completions is not used, because it returns no policy version per token. vLLM
renders the whole conversation again before every turn. If the new prompt begins with exactly the
earlier tokens, it extends the training row. Otherwise a new row begins (row_builder.py).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from renderers import Renderer

from envs.messages import Message
from rl.inference.completion import Completion
from rl.model.tokenizer import load_parser
from rl.sampling.chat import ChatSettings, Prompt, ToolSpecs
from rl.sampling.clock import CompletionSlots
from rl.sampling.prefix_probe import report_rewriting, rewrites_history
from rl.sampling.renderer_chat import RendererChat, vllm_client


@dataclass
class TokensChat(RendererChat):
    """A chat whose prompts vLLM renders and whose completions `renderer` parses."""

    render_error: ClassVar[type[Exception]] = ValueError
    on_rewrite: Literal["fork", "refuse"] | None = None  # None if each episode has one turn
    template_options: Mapping[str, Any] | None = None  # variables of the chat template
    # Empty, or the task that tests the template. Copies of the chat share this list.
    # `connect` cannot run the test, because vLLM may still be starting or lack the LoRA adapter.
    _test_task: list[asyncio.Task[None]] = field(default_factory=list)

    async def check_server(self) -> None:
        if self.on_rewrite is None:
            return
        if not self._test_task:
            self._test_task.append(asyncio.create_task(self._test_template(self.on_rewrite)))
        await asyncio.shield(self._test_task[0])  # a cancelled group does not cancel the test

    async def _test_template(self, on_rewrite: str) -> None:
        if await rewrites_history(self, self.renderer):
            choices = "fork (drop thinking), or client=renderer client.on_rewrite=extend (keep it)"
            report_rewriting(on_rewrite, choices)

    def num_prompt_tokens(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:  # noqa: ARG002
        """Return None, because only vLLM can count the tokens, and it may not have started yet."""
        return None

    async def first_prompt(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        assert self.requests is not None, "call first_prompt() within group()"
        token_ids = await self.requests.tokenize(messages, tools, self.template_options)
        return Prompt(messages, tools, token_ids)

    async def next_prompt(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        return await self.render_again(prompt, completion, message, reply)


@dataclass(frozen=True, kw_only=True)
class TokensClient:
    """The client of conf/client/tokens.yaml: vLLM renders prompts to tokens."""

    needs_vllm: ClassVar[bool] = True
    measures_prompts: ClassVar[bool] = False
    on_rewrite: Literal["fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSettings) -> AsyncIterator[TokensChat]:
        options = setting.renderer_options
        renderer: Renderer = load_parser(setting.model, setting.renderer, options)
        async with vllm_client(setting) as client:
            yield TokensChat(
                *(setting.sampler, renderer, client, setting.max_seq_len, setting.version),
                on_rewrite=self.on_rewrite if setting.is_multi_turn else None,
                template_options=options,
                slots=CompletionSlots(setting.num_seqs),
            )
