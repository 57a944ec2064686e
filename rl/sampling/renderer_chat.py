"""Chat client that renders prompts in this process. The options of conf/client are:

    renderer   this process renders messages to tokens (`renderers`), vLLM gets tokens (default)
    tokens     vLLM renders messages to tokens with its own chat template, then gets the tokens
    messages   any OpenAI-compatible server gets text, for evaluation only (messages_chat.py)

Some chat formats drop the thinking of earlier turns (Qwen3, DeepSeek-R1). The prompt of turn two
then does not begin with the tokens of turn one, and a rollout becomes several training rows. A
test at the start of a run detects this, and the option `on_rewrite` selects the reaction.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, cast

from renderers import ParsedToolCall, Renderer

from envs.messages import Message, assistant, well_formed
from rl.inference.client import GroupClient, VLLMClient
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.model.tokenizer import Tokenizer, decoded, load_renderer
from rl.sampling.chat import Chat, ChatSettings, Prompt, ToolSpecs, checked_call, invalid_call
from rl.sampling.clock import Seats
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.sampler import PolicySampler

_MIN_TOKENS_PER_S = 1.0  # assumed minimum speed of a completion, in tokens per second
_CALL_ERRORS = {  # status of a tool call that the renderer parsed -> error text
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}


@dataclass
class RendererChat(Chat):
    """The default chat, which sends prompt tokens to vLLM and receives sampled tokens.

    Attributes:
        version: the newest policy version with which vLLM samples.
        requests: the vLLM client of the current group; None outside of `group`.
    """

    refusal: ClassVar[type[Exception]] = Exception  # error if a conversation cannot be rendered
    renderer: Renderer
    client: VLLMClient
    max_seq_len: int
    version: LiveVersion
    requests: GroupClient | None = field(default=None, kw_only=True)

    def measure(self, messages: list[Message], tools: ToolSpecs | None) -> int | None:
        return len(render(self.renderer, messages, tools))

    async def open(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        return Prompt(messages, tools, render(self.renderer, messages, tools))

    async def generate(self, prompt: Prompt, n: int, seed: int | None = None) -> list[Completion]:
        sampling = {
            **self.sampler.sampling(self.renderer),
            "max_tokens": self.max_new_tokens(prompt),
        }
        if seed is not None:
            sampling["seed"] = seed
        assert self.requests is not None, "only within group()"
        version = self.version.number
        return await self.requests.generate(prompt.token_ids, sampling, n=n, version=version)

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Parse the sampled tokens; an unparsable tool call keeps its text and gets an `error`."""
        if completion.stop is None:
            return self._parse(prompt, completion.token_ids)
        return self._parse(prompt, before_stop(self.renderer, completion))

    def _history_message(self, prompt: Prompt, completion: Completion, message: Message) -> Message:
        """Return the message for the history, with the whole sampled text and the stop text."""
        return message if completion.stop is None else self._parse(prompt, completion.token_ids)

    def _parse(self, prompt: Prompt, token_ids: list[int]) -> Message:
        try:
            parsed = self.renderer.parse_response(
                token_ids, tools=cast("Any", prompt.tools), prompt_ids=prompt.token_ids
            )
        except Exception as error:  # noqa: BLE001 parsers of a library may raise anything
            return self._unparsable_message(token_ids, error)
        message: Message = {"role": "assistant", "content": well_formed(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = well_formed(parsed.reasoning_content)
        if parsed.tool_calls:
            message["tool_calls"] = [_call(i, c) for i, c in enumerate(parsed.tool_calls)]
        return message

    def _unparsable_message(self, token_ids: list[int], error: Exception) -> Message:
        """Return an unparsable turn as a message with its text and a call that has an error."""
        mistake = f"the turn is too deeply nested or has too long a number ({type(error).__name__})"
        content = well_formed(decoded(self.renderer, token_ids))
        return {**assistant(content), "tool_calls": [invalid_call("call_0", "", mistake)]}

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Append completion and reply to the prompt, or render again if the format requires it."""
        # The bridge keeps the sampled tokens, because rendering their text may give other tokens.
        bridged = self.renderer.bridge_to_next_turn(
            prompt.token_ids,
            completion.token_ids,
            cast("list[Any]", reply),
            tools=cast("Any", prompt.tools),
        )
        if bridged is None:
            return await self.rendered_again(prompt, completion, message, reply)
        messages = [*prompt.messages, self._history_message(prompt, completion, message), *reply]
        return Prompt(messages, prompt.tools, bridged.token_ids)

    async def rendered_again(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Render the conversation; a turn that the format cannot render becomes plain text."""
        try:
            turn = self._history_message(prompt, completion, message)
            return await self.open([*prompt.messages, turn, *reply], prompt.tools)
        except self.refusal:
            text = assistant(well_formed(decoded(self.renderer, completion.token_ids)))
            # An error here is caused by the reply, because plain text can be rendered.
            return await self.open([*prompt.messages, text, *reply], prompt.tools)

    def max_new_tokens(self, prompt: Prompt) -> int:
        """Return the maximum length of a completion, limited by max_tokens and max_seq_len."""
        return min(self.sampler.max_tokens, self.max_seq_len - len(prompt.token_ids))

    def shares_request(self, prompt: Prompt) -> bool:
        """Return whether even slow completions end before the timeout if they share a request."""
        return 0 < self.max_new_tokens(prompt) <= self.sampler.rollout_timeout * _MIN_TOKENS_PER_S

    def fills_context(self, completion: Completion) -> bool:
        """Return whether prompt and completion fill max_seq_len."""
        return len(completion.prompt_ids) + len(completion.token_ids) >= self.max_seq_len

    @contextmanager
    def group(self) -> Iterator[Self]:
        with self.client.group() as requests:
            yield replace(self, requests=requests)

    def pinned(self, sampler: PolicySampler, version: int) -> Self:
        return replace(self, sampler=sampler, version=LiveVersion(version))


def _call(index: int, parsed: ParsedToolCall) -> Message:
    call_id = parsed.id or f"call_{index}"
    if parsed.status == "ok":
        return checked_call(call_id, parsed.name, parsed.arguments, parsed.raw)
    mistake = _CALL_ERRORS.get(parsed.status, str(parsed.status))
    return invalid_call(call_id, parsed.raw, mistake, parsed.name)


def before_stop(renderer: Renderer, completion: Completion) -> list[int]:
    """Return the tokens of a completion before its stop text (`sampler.stop`).

        sampled    The answer is 5.</answer>    trained on, because the policy chose these tokens
        message    The answer is 5.             sent to the environment, as in the OpenAI API
        history    The answer is 5.</answer>    shown to the policy in its next turn

    vLLM stops after the token that completes the stop text. The stop text may begin or end inside a
    token, so that token may be split.
    """
    tokenizer: Tokenizer = cast("Any", renderer)._tokenizer  # every renderer has this attribute
    token_ids = completion.token_ids
    text, stop, _ = tokenizer.decode(token_ids).partition(completion.stop or " ")
    if not stop:
        return token_ids  # the stop text appears only if tokens are decoded one by one
    for end in range(len(token_ids), -1, -1):
        head = tokenizer.decode(token_ids[:end])
        if text.startswith(head):
            return [*token_ids[:end], *tokenizer.encode(text[len(head) :])]
    raise AssertionError("the empty text is a prefix of every text")


def render(
    renderer: Renderer, messages: list[Message], tools: ToolSpecs | None = None
) -> list[int]:
    """Return the token ids of a prompt. The casts are needed for the types of `renderers`."""
    return renderer.render_ids(
        cast("list[Any]", messages), tools=cast("Any", tools), add_generation_prompt=True
    )


@dataclass(frozen=True, kw_only=True)
class RendererClient:
    """The default client: this process renders prompts to tokens (conf/client/renderer.yaml)."""

    needs_vllm: ClassVar[bool] = True
    renders: ClassVar[bool] = True  # in this process, so that the chat format must be known
    on_rewrite: Literal["extend", "fork", "refuse"]

    @asynccontextmanager
    async def connect(self, setting: ChatSettings) -> AsyncIterator[RendererChat]:
        """Load the renderer and open the connections to vLLM.

        Raises:
            ValueError: the chat format rewrites history, and on_rewrite=refuse.
        """
        renderer = load_renderer(setting.model, setting.renderer)
        async with vllm_client(setting) as client:
            seats = Seats(setting.num_seqs)
            limit, version = setting.max_seq_len, setting.version
            chat = RendererChat(setting.sampler, renderer, client, limit, version, seats=seats)
            if setting.has_turns and await rewrites(chat, renderer):
                choices = (
                    "extend (keep thinking, one row), fork (drop thinking, several rows) or refuse"
                )
                report_rewriting(self.on_rewrite, choices)
                # on_rewrite=fork needs no action, because row_builder.py detects rewritten prompts.
                if self.on_rewrite == "extend":
                    await self._keep_thinking(chat, setting)
            yield chat

    async def _keep_thinking(self, chat: RendererChat, setting: ChatSettings) -> None:
        chat.renderer = load_renderer(setting.model, setting.renderer, keep_thinking=True)
        if await rewrites(chat, chat.renderer):
            raise ValueError(
                f"client.on_rewrite=extend, but the chat format {setting.renderer!r} cannot keep "
                "thinking from earlier turns: choose fork"
            )


def vllm_client(setting: ChatSettings) -> VLLMClient:
    """Return a client of the run's vLLM replicas that is not connected yet."""
    timeout = setting.sampler.rollout_timeout
    return VLLMClient(setting.router, model=setting.served_as, timeout=timeout, tally=setting.tally)
