"""conf/client: how rollouts talk to the server, and what happens if the format rewrites history.

    renderer   messages -> tokens in this process (`renderers`), tokens to vLLM      the default
    tokens     messages -> tokens by the server's own chat template, tokens to vLLM
    messages   text to any OpenAI-compatible server: evaluation only (rl/sampling/messages_chat.py)

Some chat formats drop the thinking of earlier turns (Qwen3, DeepSeek-R1). The prompt of turn two
then does not begin with the tokens of turn one, and a rollout becomes several training rows. A
probe detects this at the start, and `on_rewrite` says what to do.
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
from rl.sampling.chat import Chat, ChatSetting, Prompt, ToolSpecs, checked_call, mistaken_call
from rl.sampling.clock import Seats
from rl.sampling.prefix_probe import report_rewriting, rewrites
from rl.sampling.sampler import PolicySampler

_SLOWEST = 1.0  # tokens a second of one completion
_MISTAKES = {  # of a tool call, by the renderer's status
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call has no name",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}


@dataclass
class RendererChat(Chat):
    """Tokens in, tokens out. The default.

    Attributes:
        version: the newest policy version that vLLM samples with.
        requests: the client of a group; None outside of `group`.

    """

    refusal: ClassVar[type[Exception]] = Exception  # of a conversation; libraries raise anything
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
        sampling = {**self.sampler.sampling(self.renderer), "max_tokens": self.room(prompt)}
        if seed is not None:
            sampling["seed"] = seed
        assert self.requests is not None, "only within group()"
        version = self.version.number
        return await self.requests.generate(prompt.token_ids, sampling, n=n, version=version)

    def message(self, prompt: Prompt, completion: Completion) -> Message:
        """Parse the sampled tokens; calls that cannot be parsed keep their text and say why."""
        if completion.stop is None:
            return self._parsed(prompt, completion.token_ids)
        return self._parsed(prompt, before_stop(self.renderer, completion))

    def _sampled(self, prompt: Prompt, completion: Completion, message: Message) -> Message:
        """Return the message as history holds it: all that was sampled, the stop text included."""
        return message if completion.stop is None else self._parsed(prompt, completion.token_ids)

    def _parsed(self, prompt: Prompt, token_ids: list[int]) -> Message:
        try:
            parsed = self.renderer.parse_response(
                token_ids, tools=cast("Any", prompt.tools), prompt_ids=prompt.token_ids
            )
        except Exception as error:  # noqa: BLE001 parsers of a library may raise anything
            return self._unreadable(token_ids, error)
        message: Message = {"role": "assistant", "content": well_formed(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = well_formed(parsed.reasoning_content)
        if parsed.tool_calls:
            message["tool_calls"] = [_call(i, c) for i, c in enumerate(parsed.tool_calls)]
        return message

    def _unreadable(self, token_ids: list[int], error: Exception) -> Message:
        """Return a message for a turn that cannot be parsed: its text, and a call with an error."""
        mistake = f"the turn cannot be read ({type(error).__name__}): nest less, shorten numbers"
        content = well_formed(decoded(self.renderer, token_ids))
        return {**assistant(content), "tool_calls": [mistaken_call("call_0", "", mistake)]}

    async def follow(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Extend the tokens so far; if the format does not allow it, render everything again."""
        # Not rendered again, because encoding the decoded text may give other tokens.
        bridged = self.renderer.bridge_to_next_turn(
            prompt.token_ids,
            completion.token_ids,
            cast("list[Any]", reply),
            tools=cast("Any", prompt.tools),
        )
        if bridged is None:
            return await self.rendered_again(prompt, completion, message, reply)
        messages = [*prompt.messages, self._sampled(prompt, completion, message), *reply]
        return Prompt(messages, prompt.tools, bridged.token_ids)

    async def rendered_again(
        self, prompt: Prompt, completion: Completion, message: Message, reply: list[Message]
    ) -> Prompt:
        """Render the whole conversation; as text, if the format cannot render the policy's turn."""
        try:
            turn = self._sampled(prompt, completion, message)
            return await self.open([*prompt.messages, turn, *reply], prompt.tools)
        except self.refusal:
            text = assistant(well_formed(decoded(self.renderer, completion.token_ids)))
            # An error from here on is the reply's.
            return await self.open([*prompt.messages, text, *reply], prompt.tools)

    def room(self, prompt: Prompt) -> int:
        """Return the token limit of the turn, or what the context still holds."""
        return min(self.sampler.max_tokens, self.max_seq_len - len(prompt.token_ids))

    def shares(self, prompt: Prompt) -> bool:
        """Return whether even a slow completion ends in time, so that no group is lost."""
        return 0 < self.room(prompt) <= self.sampler.rollout_timeout * _SLOWEST

    def full(self, completion: Completion) -> bool:
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
    mistake = _MISTAKES.get(parsed.status, str(parsed.status))
    return mistaken_call(call_id, parsed.raw, mistake, parsed.name)


def before_stop(renderer: Renderer, completion: Completion) -> list[int]:
    """Return the tokens of a completion before its stop text (`sampler.stop`).

        sampled    The answer is 5.</answer>    trained on, because the policy chose these tokens
        message    The answer is 5.             what the environment reads, as in the OpenAI API
        history    The answer is 5.</answer>    what the policy sees in its next turn

    vLLM stops at the token that completes the text. The text may begin and end within a token, so a
    token may be split.
    """
    tokenizer: Tokenizer = cast("Any", renderer)._tokenizer  # where every renderer family stores it
    token_ids = completion.token_ids
    text, stop, _ = tokenizer.decode(token_ids).partition(completion.stop or " ")
    if not stop:
        return token_ids  # only the tokens decoded one by one contain it
    for end in range(len(token_ids), -1, -1):
        head = tokenizer.decode(token_ids[:end])
        if text.startswith(head):
            return [*token_ids[:end], *tokenizer.encode(text[len(head) :])]
    raise AssertionError("the empty text is a prefix of every text")


def render(
    renderer: Renderer, messages: list[Message], tools: ToolSpecs | None = None
) -> list[int]:
    """Return the prompt ids; casts, because `renderers` has stricter types for messages."""
    return renderer.render_ids(
        cast("list[Any]", messages), tools=cast("Any", tools), add_generation_prompt=True
    )


@dataclass(frozen=True, kw_only=True)
class RendererClient:
    """conf/client/renderer.yaml: tokens in, tokens out, rendered in this process."""

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
            seats = Seats(setting.num_seqs)
            limit, version = setting.max_seq_len, setting.version
            chat = RendererChat(setting.sampler, renderer, client, limit, version, seats=seats)
            if setting.has_turns and await rewrites(chat, renderer):
                choices = "extend (keep it, one row), fork (drop it as the format does) or refuse"
                report_rewriting(self.on_rewrite, choices)
                # A fork needs nothing here: row_builder.py compares each prompt with the last row.
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
    """Return the client of the run's vLLM, not yet connected."""
    timeout = setting.sampler.rollout_timeout
    return VLLMClient(setting.router, model=setting.served_as, timeout=timeout, tally=setting.tally)
