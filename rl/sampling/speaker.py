"""Samples the policy's turns for environments that manage the conversation themselves.

    messages, tools -> prompt -> server -> Completion -> training row and message

The environment passes the whole conversation at each turn, like a client of a chat endpoint. If all
earlier messages are unchanged, the sampled tokens are extended. If the environment changed an
earlier message, the conversation is rendered again and the rollout forks.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from envs.episode import Episode, StopReason
from envs.messages import Message, parse_json
from envs.protocol import ContextFull, Spoken
from rl.inference.completion import Completion, GenerationError
from rl.sampling.chat import Chat, Prompt, ToolSpecs
from rl.sampling.row_builder import RowBuilder
from rl.sampling.sampler import RequestSeeds


@dataclass
class Speaker:
    """Callable that samples the policy's turns in one episode and adds them to `rows`.

    Attributes:
        engine: returns a context manager that is entered during each server request.
        seeds: the seeds of the requests, one per turn.
        opened: adds the configured system prompt to messages.
        stop_reason: why the newest turn ended; CONTEXT if the context cannot hold another turn.
    """

    chat: Chat
    rows: RowBuilder
    episode: Episode
    engine: Callable[[], AbstractAsyncContextManager[None]]
    seeds: RequestSeeds
    opened: Callable[[list[Message]], list[Message]]
    stop_reason: StopReason = StopReason.STOP
    # Conversation, prompt and completion of the newest turn.
    _last: tuple[list[Message], Prompt, Completion] | None = None
    _failure: GenerationError | None = field(default=None, repr=False)

    async def __call__(self, messages: list[Message], tools: ToolSpecs | None) -> Spoken:
        """Return the policy's turn after `messages`.

        Raises:
            ContextFull: the prompt fills max_seq_len.
        """
        messages = self.opened(messages)
        prompt = await self._prompt(messages, tools)
        if self.chat.max_new_tokens(prompt) <= 0:
            self.stop_reason = StopReason.CONTEXT
            raise ContextFull("the conversation fills max_seq_len")
        # The seed is drawn before the request, so that parallel turns get different seeds in order.
        seed = self.seeds.next()
        try:
            async with self.engine():
                (completion,) = await self.chat.generate(prompt, 1, seed)
        except GenerationError as error:
            self._failure = error
            raise
        self.rows.turn(completion)
        await self.rows.add_hint(prompt)
        message = self.chat.message(prompt, completion)
        conversation = [*messages, message]
        self._last = (conversation, prompt, completion)
        self.stop_reason = self.chat.stop_reason(completion)
        self.episode.messages = list(conversation)
        self.episode.turns += 1
        self.episode.tool_calls += len(message.get("tool_calls") or [])
        return Spoken(
            message, completion.cut_off, len(completion.prompt_ids), len(completion.token_ids)
        )

    def raise_failure(self) -> None:
        """Raise the error of a failed request, because the environment may have caught it."""
        if self._failure is not None:
            raise self._failure

    async def _prompt(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        if self._last is not None:
            before, prompt, completion = self._last
            # The sampled tokens are kept only if a reply was added and nothing else changed.
            reply = messages[len(before) :]
            repeated = messages[: len(before)]
            if reply and prompt.tools == tools and _same_messages(before, repeated):
                return await self.chat.follow(prompt, completion, before[-1], reply)
        return await self.chat.open(messages, tools)


def _same_messages(before: list[Message], repeated: list[Message]) -> bool:
    """Return whether messages are equal apart from ids and reasoning, which clients may drop."""
    return [_content(m) for m in before] == [_content(m) for m in repeated]


def _content(message: Message) -> tuple[object, ...]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], _arguments(function["arguments"])) for function in functions]
    return message["role"], message.get("content") or "", calls


def _arguments(given: object) -> object:
    """Return a tool call's arguments as a value; text that is not JSON stays text."""
    if not isinstance(given, str):
        return given
    try:
        return parse_json(given or "{}")
    except ValueError:
        return given
