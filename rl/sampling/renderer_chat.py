"""Chat client that renders prompts to tokens in the rollouts process. The choices of conf/client:

    renderer   the default: the library `renderers` renders messages to tokens for vLLM
    tokens     vLLM renders messages to tokens with its own chat template (tokens_chat.py)
    messages   any OpenAI-compatible server gets text; not for training (messages_chat.py)

Some chat formats drop the thinking of earlier turns (Qwen3, DeepSeek-R1). The prompt of turn two
then does not begin with the tokens of turn one, and a rollout becomes several training rows. The
client tests the format before a multi-turn run. `client.on_rewrite` then decides: later prompts
keep the thinking (extend), several rows are trained (fork), or the run does not start (refuse).
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, cast

from renderers import ParsedToolCall, Renderer

from envs.messages import Message, assistant, replace_surrogates
from envs.protocol import ContextFull
from rl.inference.client import GroupClient, VLLMClient
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.model.tokenizer import Tokenizer, decode_text, load_renderer
from rl.sampling.chat import Chat, ChatSettings, Prompt, ToolSpecs, checked_call, invalid_call
from rl.sampling.clock import CompletionSlots
from rl.sampling.prefix_probe import report_rewriting, rewrites_history

_MIN_TOKENS_PER_S = 1.0  # assumed lowest sampling speed of one completion
_CALL_ERRORS = {  # `ParsedToolCall.status` -> error text for the policy
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}


@dataclass
class RendererChat(Chat):
    """The default chat, which sends prompt tokens to vLLM and receives sampled tokens."""

    render_error: ClassVar[type[Exception]] = Exception  # raised if a message cannot be rendered
    renderer: Renderer
    client: VLLMClient
    max_seq_len: int
    version: LiveVersion  # the policy version that vLLM has loaded
    requests: GroupClient | None = field(default=None, kw_only=True)  # None outside of `group()`

    def num_prompt_tokens(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:
        return len(render(self.renderer, messages, tools))

    async def first_prompt(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        return Prompt(messages, tools, render(self.renderer, messages, tools))

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        sampling = {
            **self.sampler.sampling(self.renderer),
            "max_tokens": self.max_new_tokens(prompt),
        }
        if seed is not None:
            sampling["seed"] = seed
        assert self.requests is not None, "call generate() within group()"
        version = self.version.number
        return await self.requests.generate(prompt.token_ids, sampling, n=n, version=version)

    def encode(self, text: str | Sequence[int]) -> list[int]:
        tokenizer: Tokenizer = cast("Any", self.renderer)._tokenizer
        return tokenizer.encode(text) if isinstance(text, str) else [*text]

    async def score(self, token_ids: list[int], count: int) -> tuple[list[float], int]:
        if len(token_ids) >= self.max_seq_len:  # vLLM must also sample one token after `token_ids`
            raise ContextFull(f"prompt and text fill max_seq_len={self.max_seq_len}: raise it")
        assert self.requests is not None, "call score() within group()"
        return await self.requests.score(token_ids, count, version=self.version.number)

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Parse a completion without its stop text. An invalid tool call gets an `error`."""
        if completion.stop is None:
            return self._parse(prompt, completion.token_ids)
        return self._parse(prompt, tokens_before_stop(self.renderer, completion))

    def _history_message(self, prompt: Prompt, completion: Completion, message: Message) -> Message:
        """Return the message that later prompts contain, with the stop text."""
        return message if completion.stop is None else self._parse(prompt, completion.token_ids)

    def _parse(self, prompt: Prompt, token_ids: list[int]) -> Message:
        try:
            parsed = self.renderer.parse_response(
                token_ids, tools=cast("Any", prompt.tools), prompt_ids=prompt.token_ids
            )
        except Exception as error:  # noqa: BLE001 a parser of `renderers` may raise any error
            cause = f"the turn cannot be parsed; it may be nested too deep ({type(error).__name__})"
            content = replace_surrogates(decode_text(self.renderer, token_ids))
            return {**assistant(content), "tool_calls": [invalid_call("call_0", "", cause)]}
        message: Message = {"role": "assistant", "content": replace_surrogates(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = replace_surrogates(parsed.reasoning_content)
        if parsed.tool_calls:
            message["tool_calls"] = [_tool_call(i, c) for i, c in enumerate(parsed.tool_calls)]
        return message

    async def next_prompt(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Append completion and reply to the prompt's tokens, or render the whole conversation."""
        # The result begins with all tokens so far, or is None if the format changes earlier turns.
        bridged = self.renderer.bridge_to_next_turn(
            prompt.token_ids,
            completion.token_ids,
            cast("list[Any]", reply),
            tools=cast("Any", prompt.tools),
        )
        if bridged is None:
            return await self.render_again(prompt, completion, message, reply)
        messages = [*prompt.messages, self._history_message(prompt, completion, message), *reply]
        return Prompt(messages, prompt.tools, bridged.token_ids)

    async def render_again(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Render all messages. If the format cannot render the newest turn, use its plain text."""
        try:
            turn = self._history_message(prompt, completion, message)
            return await self.first_prompt([*prompt.messages, turn, *reply], prompt.tools)
        except self.render_error:
            text = assistant(replace_surrogates(decode_text(self.renderer, completion.token_ids)))
            # Every format renders plain text, so an error here comes from the environment's reply.
            return await self.first_prompt([*prompt.messages, text, *reply], prompt.tools)

    def max_new_tokens(self, prompt: Prompt) -> int:
        return min(self.sampler.max_tokens, self.max_seq_len - len(prompt.token_ids))

    def shares_request(self, prompt: Prompt) -> bool:
        """Return False if no token fits or the longest completion could exceed rollout_timeout."""
        return 0 < self.max_new_tokens(prompt) <= self.sampler.rollout_timeout * _MIN_TOKENS_PER_S

    def fills_context(self, completion: Completion) -> bool:
        return len(completion.prompt_ids) + len(completion.token_ids) >= self.max_seq_len

    @contextmanager
    def group(self) -> Iterator[Self]:
        with self.client.group() as requests:
            yield replace(self, requests=requests)


def _tool_call(index: int, parsed: ParsedToolCall) -> Message:
    call_id = parsed.id or f"call_{index}"
    if parsed.status == "ok":
        return checked_call(call_id, parsed.name, parsed.arguments, parsed.raw)
    mistake = _CALL_ERRORS.get(parsed.status, str(parsed.status))
    return invalid_call(call_id, parsed.raw, mistake, parsed.name)


def tokens_before_stop(renderer: Renderer, completion: Completion) -> list[int]:
    """Return the tokens of a completion before its stop text (an item of `sampler.stop`).

        sampled    The answer is 5.</answer>    trained on, because the policy chose these tokens
        message    The answer is 5.             sent to the environment, as in the OpenAI API
        history    The answer is 5.</answer>    shown to the policy in its next turn

    vLLM stops after the token that completes the stop text. If the stop text begins inside a token,
    the characters of that token before the stop text are tokenized again.
    """
    tokenizer: Tokenizer = cast("Any", renderer)._tokenizer  # every renderer has this attribute
    token_ids = completion.token_ids
    text, stop, _ = tokenizer.decode(token_ids).partition(completion.stop or " ")
    if not stop:
        return token_ids  # the text of all tokens together does not contain the stop text
    for end in range(len(token_ids), -1, -1):
        head = tokenizer.decode(token_ids[:end])
        if text.startswith(head):
            return [*token_ids[:end], *tokenizer.encode(text[len(head) :])]
    raise AssertionError("unreachable, because every text starts with the empty text")


def render(
    renderer: Renderer, messages: list[Message], tools: ToolSpecs | None = None
) -> list[int]:
    """Return the token ids of a prompt that ends where the policy's turn begins."""
    return renderer.render_ids(
        cast("list[Any]", messages), tools=cast("Any", tools), add_generation_prompt=True
    )


@dataclass(frozen=True, kw_only=True)
class RendererClient:
    """The client of conf/client/renderer.yaml: the rollouts process renders prompts to tokens."""

    needs_vllm: ClassVar[bool] = True
    renders: ClassVar[bool] = True  # the library `renderers` must know the chat format
    on_rewrite: Literal["extend", "fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSettings) -> AsyncIterator[RendererChat]:
        renderer = load_renderer(setting.model, setting.renderer, setting.renderer_options)
        async with vllm_client(setting) as client:
            slots = CompletionSlots(setting.num_seqs)
            limit, version = setting.max_seq_len, setting.version
            chat = RendererChat(setting.sampler, renderer, client, limit, version, slots=slots)
            if setting.is_multi_turn and await rewrites_history(chat, renderer):
                choices = "extend (keep thinking, one row) or fork (drop thinking, several rows)"
                report_rewriting(self.on_rewrite, choices)
                # If on_rewrite=fork, row_builder.py begins the new rows.
                if self.on_rewrite == "extend":
                    await self._keep_thinking(chat, setting)
            yield chat

    async def _keep_thinking(self, chat: RendererChat, setting: ChatSettings) -> None:
        chat_format = setting.renderer, setting.renderer_options
        chat.renderer = load_renderer(setting.model, *chat_format, keep_thinking=True)
        if await rewrites_history(chat, chat.renderer):
            raise ValueError(
                f"client.on_rewrite=extend, but the chat format {setting.renderer!r} cannot keep "
                "the thinking of earlier turns: set client.on_rewrite=fork"
            )


def vllm_client(setting: ChatSettings) -> VLLMClient:
    """Return a client of the run's vLLM replicas. It connects at its first request."""
    timeout = setting.sampler.rollout_timeout
    return VLLMClient(setting.router, model=setting.served_as, timeout=timeout, tally=setting.tally)
