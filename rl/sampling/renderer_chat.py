"""conf/client: how we talk to whoever serves the policy, and what becomes of rewritten history.

    renderer   messages -> tokens here (`renderers`), tokens to our vLLM      the default
    tokens     messages -> tokens by the server's own chat template, tokens to our vLLM
    messages   words to any OpenAI-compatible server: evaluation only (rl/sampling/messages_chat.py)

Some chat formats drop the thinking of earlier turns (Qwen3, DeepSeek-R1): the prompt of turn two
then does not begin with the tokens of turn one, and a rollout becomes several training rows. It is
found out at the start, by a probe, and `on_rewrite` says what to do.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, cast

from renderers import ParsedToolCall, Renderer

from envs.messages import Message, assistant, well_formed
from rl.inference.client import Client, VLLMClient
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.model.tokenizer import decoded, load_renderer
from rl.sampling.chat import ChatSetting, Prompt, ToolSpecs
from rl.sampling.clock import Seats
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.sampler import PolicySampler
from rl.sampling.stop_texts import before_stop
from rl.sampling.tool_calls import checked_call, mistaken_call

_SLOWEST = 1.0  # tokens a second of one completion
_MISTAKES = {  # of a tool call, by the renderer's status
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}


@dataclass
class RendererChat:
    """Tokens in, tokens out. The default.

    Attributes:
        version: the newest policy version known to be live.

    """

    sampler: PolicySampler
    renderer: Renderer
    client: Client
    max_seq_len: int
    version: LiveVersion
    seats: Seats = field(default_factory=Seats)  # shared by copies

    async def ready(self) -> None:
        """Nothing: `connect` renders by itself, and knows."""

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:
        """Render it."""
        return len(render(self.renderer, messages, tools))

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        """Render the opening messages."""
        return Prompt(messages, tools, render(self.renderer, messages, tools))

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        """Sample from vLLM."""
        sampling = {**self.sampler.sampling(self.renderer), "max_tokens": self.room(prompt)}
        if seed is not None:
            sampling["seed"] = seed
        version = self.version.number
        return await self.client.generate(prompt.token_ids, sampling, n=n, version=version)

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Parse the sampled tokens; calls that cannot be parsed keep their text and say why."""
        if completion.stop is None:
            return self._parsed(prompt, completion.token_ids)
        return self._parsed(prompt, before_stop(self.renderer, completion))

    def sampled(self, prompt: Prompt, completion: Completion, message: Message) -> Message:
        """Return the message as history holds it: all that was sampled, the stop text included."""
        return message if completion.stop is None else self._parsed(prompt, completion.token_ids)

    def _parsed(self, prompt: Prompt, token_ids: list[int]) -> Message:
        try:
            parsed = self.renderer.parse_response(
                token_ids, tools=cast("Any", prompt.tools), prompt_ids=prompt.token_ids
            )
        except Exception as error:  # noqa: BLE001 twenty parsers, none ours, and any text
            return self._unreadable(token_ids, error)
        message: Message = {"role": "assistant", "content": well_formed(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = well_formed(parsed.reasoning_content)
        if parsed.tool_calls:
            message["tool_calls"] = [_call(i, c) for i, c in enumerate(parsed.tool_calls)]
        return message

    def _unreadable(self, token_ids: list[int], error: Exception) -> Message:
        """A turn that the parser itself fell over: its text, and a call that says so."""
        mistake = f"the turn cannot be read ({type(error).__name__}): nest less, shorten numbers"
        content = well_formed(decoded(self.renderer, token_ids))
        return {**assistant(content), "tool_calls": [mistaken_call("call_0", "", mistake)]}

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Extend the tokens so far; where the format forbids it, render everything anew."""
        # Not rendered again: decoded and encoded, text need not give the sampled tokens back.
        bridged = self.renderer.bridge_to_next_turn(
            prompt.token_ids,
            completion.token_ids,
            cast("list[Any]", reply),
            tools=cast("Any", prompt.tools),
        )
        messages = [*prompt.messages, self.sampled(prompt, completion, message), *reply]
        if bridged is not None:
            return Prompt(messages, prompt.tools, bridged.token_ids)
        try:
            return Prompt(messages, prompt.tools, render(self.renderer, messages, prompt.tools))
        except Exception:  # noqa: BLE001 a format may have no form for what the policy wrote
            text = assistant(well_formed(decoded(self.renderer, completion.token_ids)))
            messages = [*prompt.messages, text, *reply]  # what raises now is the reply's fault
            return Prompt(messages, prompt.tools, render(self.renderer, messages, prompt.tools))

    def room(self, prompt: Prompt) -> int:
        """The turn's limit, or what the row still holds."""
        return min(self.sampler.max_tokens, self.max_seq_len - len(prompt.token_ids))

    def shares(self, prompt: Prompt) -> bool:
        """Whether the longest completion is done in time even at a crawl: so no group is lost."""
        return 0 < self.room(prompt) <= self.sampler.rollout_timeout * _SLOWEST

    def full(self, completion: Completion) -> bool:
        """Whether prompt and completion fill max_seq_len."""
        return len(completion.prompt_ids) + len(completion.token_ids) >= self.max_seq_len

    @contextmanager
    def group(self) -> Iterator[Self]:
        """With the client of a group."""
        with self.client.group() as client:
            yield replace(self, client=client)

    def asking(self, sampler: PolicySampler) -> Self:
        """With another sampler."""
        return replace(self, sampler=sampler)

    def pinned(self, sampler: PolicySampler, version: int) -> Self:
        """With another sampler, and salts of this version whatever is published meanwhile."""
        return replace(self, sampler=sampler, version=LiveVersion(version))


def _call(index: int, parsed: ParsedToolCall) -> Message:
    call_id = parsed.id or f"call_{index}"
    if parsed.status == "ok":
        return checked_call(call_id, parsed.name, parsed.arguments, parsed.raw)
    mistake = _MISTAKES.get(parsed.status, str(parsed.status))
    return mistaken_call(call_id, parsed.raw, mistake, parsed.name)


def render(
    renderer: Renderer, messages: list[Message], tools: ToolSpecs | None = None
) -> list[int]:
    """Return the prompt ids. Our messages are plain dicts, which `renderers` types more tightly."""
    return renderer.render_ids(
        cast("list[Any]", messages), tools=cast("Any", tools), add_generation_prompt=True
    )


@dataclass(frozen=True, kw_only=True)
class RendererClient:
    """conf/client/renderer.yaml: tokens in, tokens out, rendered here."""

    needs_vllm: ClassVar[bool] = True
    on_rewrite: Literal["extend", "fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSetting) -> AsyncIterator[RendererChat]:
        """Load the renderer and open the connections.

        Raises:
            ValueError: history would be rewritten, and on_rewrite=refuse.

        """
        renderer = load_renderer(setting.model, setting.renderer)
        async with vllm_client(setting) as client:
            chat = RendererChat(
                setting.sampler,
                renderer,
                client,
                setting.max_seq_len,
                setting.version,
                Seats(setting.num_seqs),
            )
            if setting.has_turns and await rewrites(chat, renderer):
                choices = "extend (keep it, one row), fork (drop it as the format does) or refuse"
                report_rewriting(self.on_rewrite, choices)
                # Forking needs nothing more: rows.py sees where a prompt does not extend the last.
                if self.on_rewrite == "extend":
                    await self._keep_thinking(chat, setting)
            yield chat

    async def _keep_thinking(self, chat: RendererChat, setting: ChatSetting) -> None:
        chat.renderer = load_renderer(setting.model, setting.renderer, keep_thinking=True)
        if await rewrites(chat, chat.renderer):
            raise ValueError(
                f"client.on_rewrite=extend, but the chat format {setting.renderer!r} cannot keep "
                "thinking from earlier turns: choose fork"
            )


def vllm_client(setting: ChatSetting) -> VLLMClient:
    """Return the connections to our vLLM, still closed."""
    timeout = setting.sampler.rollout_timeout
    return VLLMClient(setting.router, model=setting.served_as, timeout=timeout, tally=setting.tally)
