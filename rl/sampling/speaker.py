"""Sample the policy's turns for environments with `holds_conversation=True`.

    messages, tools -> prompt -> server -> Completion -> training row and message

Such an environment passes the whole conversation at each turn, like a client of a chat endpoint. If
all earlier messages are unchanged, the chat appends the new messages to the tokens so far. Else the
chat renders the whole conversation again, which usually begins a new row of training tokens.
If several roles speak in an episode, each has its own speaker, conversation and rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from envs.deadline import WAITING
from envs.episode import Episode, StopReason
from envs.messages import Message, parse_json
from envs.protocol import ContextFull, PolicyTurn
from rl.inference.completion import Completion
from rl.sampling.chat import Chat, Prompt, ToolSpecs
from rl.sampling.prefix import Prefix, sample_turn
from rl.sampling.rollout_inputs import RolloutInputs
from rl.sampling.row_builder import RowBuilder


@dataclass
class Speaker:
    """Callable that samples an episode's turns. `rows` gets only the turns of its own role."""

    chat: Chat
    rows: RowBuilder
    episode: Episode
    inputs: RolloutInputs
    stop_reason: StopReason = StopReason.STOP  # why the newest turn ended
    # (conversation, prompt, completion) of the newest turn; None before the first turn
    _last: tuple[list[Message], Prompt, Completion] | None = None
    _failure: Exception | None = field(default=None, repr=False)
    # role -> speaker, for roles that have spoken. The first role's speaker is `self`.
    _roles: "dict[str, Speaker]" = field(default_factory=dict, repr=False)

    async def __call__(
        self,
        messages: list[Message],
        tools: ToolSpecs | None,
        *,
        role: str = "",
        prefix: Sequence[int] | str | None = None,
        prefix_trains: bool = False,
    ) -> PolicyTurn:
        """Sample the next turn of `role`; raise ContextFull if the prompt fills max_seq_len."""
        if not self._roles:
            self.episode.role, self._roles[role] = role, self
        elif role not in self._roles:
            first = self.episode
            shared = {name: getattr(first, name) for name in ("number", "policy_version", "memory")}
            episode = Episode(first.example, [], **shared, role=role)
            inputs = replace(self.inputs, prefix=None)
            self._roles[role] = Speaker(self.chat, RowBuilder(), episode, inputs)
        if (speaker := self._roles[role]) is not self:
            options = {"prefix": prefix, "prefix_trains": prefix_trains}
            return await speaker(messages, tools, role=role, **options)
        messages = self.inputs.prepare(messages)
        with self._noting_errors():
            prompt = await self._next_prompt(messages, tools)
            if self.chat.max_new_tokens(prompt) <= 0:
                raise ContextFull("the conversation fills max_seq_len: raise it")
            # Draw the seed before the wait, because concurrent turns get slots in any order.
            seed, given, number = self.inputs.seeds.next(), self.inputs.prefix, self.episode.turns
            replayed = given.turn(number, prompt) if given else None
            if prefix is not None and not (replayed and replayed.token_ids):
                given, number = Prefix.of(self.chat, prefix, trains=prefix_trains), 0
            async with self.inputs.clock.hold_slots(self.chat.slots):
                completion = await sample_turn(self.chat, prompt, seed, given, number)
        self.rows.add_turn(completion, prompt)
        message = self.chat.message(prompt, completion)
        conversation = [*messages, message]
        self._last = (conversation, prompt, completion)
        self.stop_reason = self.chat.stop_reason(completion)
        self.episode.messages = list(conversation)
        self.episode.turns += 1
        self.episode.tool_calls += len(message.get("tool_calls") or [])
        return PolicyTurn(
            message, completion.cut_off, len(completion.prompt_ids), len(completion.token_ids)
        )

    async def logprobs(self, messages: list[Message], text: str, *, after: str = "") -> list[float]:
        """Return the policy's logprobs of a text (envs/protocol.py, Speak.logprobs)."""
        with self._noting_errors():
            prompt = await self.chat.first_prompt(self.inputs.prepare(messages), None)
            before, scored = self.chat.encode(after), self.chat.encode(text)
            async with self.inputs.clock.hold_slots(self.chat.slots):
                token_ids = [*prompt.token_ids, *before, *scored]
                return (await self.chat.score(token_ids, len(scored)))[0]

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Note an error, because the environment may catch it. Let waits pause the episode's clock.

        Set WAITING again, because a task of an HTTP server may have another episode's context.
        """
        token = WAITING.set(self.inputs.clock.pause)
        try:
            yield
        except ContextFull:
            self.stop_reason = StopReason.CONTEXT
            raise
        except Exception as error:
            self._failure = error
            raise
        finally:
            WAITING.reset(token)

    @property
    def speakers(self) -> "list[Speaker]":
        """The speakers of all roles, in the order of their first turns, starting with this one."""
        return [*self._roles.values()] or [self]

    def raise_failure(self) -> None:
        """Raise the error of a failed request again, in case the environment caught it."""
        for speaker in self.speakers:
            if speaker._failure is not None:
                raise speaker._failure

    async def _next_prompt(self, messages: list[Message], tools: ToolSpecs | None) -> Prompt:
        if self._last is not None:
            before, prompt, completion = self._last
            reply = messages[len(before) :]
            then, now = (list(map(_comparison_key, m)) for m in (before, messages[: len(before)]))
            if reply and prompt.tools == tools and then == now:
                return await self.chat.next_prompt(prompt, completion, before[-1], reply)
        return await self.chat.first_prompt(messages, tools)


def _comparison_key(message: Message) -> tuple[object, ...]:
    """Return the message without call ids and reasoning, because environments may drop these."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], _parsed_arguments(function["arguments"])) for function in functions]
    return message["role"], message.get("content") or "", calls


def _parsed_arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments
