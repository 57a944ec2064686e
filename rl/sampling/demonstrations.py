"""Groups made from an environment's demonstrations instead of rollouts: supervised warm starts.

A demonstration becomes exactly the tokens of a rollout in which the policy said what the expert
says. The prompts are those that a rollout sees (`render_ids(..., add_generation_prompt=True)`, then
the renderer's bridge from turn to turn), and only the policy's tokens are trained, stop token too.

Rendering the finished conversation in one go would not do: Qwen3's format opens the last assistant
turn with an empty think block, which the prompt does not hold, so the policy would learn to say it.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np
from renderers import Renderer

from envs.episode import StopReason
from envs.messages import Message
from envs.protocol import Environment
from rl.records import Rollout, Sequence

log = logging.getLogger(__name__)

_TRIES = 100  # conversations that may be too long one after the other


class TooLong(ValueError):
    """A conversation has a row longer than max_seq_len; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Imitator:
    """A sampler of conversations that no policy sampled; where they come from is all that differs.

    Attributes:
        max_staleness: batches made ahead of the trainer; text itself never ages.

    """

    uses_vllm: ClassVar[bool] = False
    temperature: ClassVar[float] = 1.0  # the trainer's logits stay as they are
    max_concurrent: ClassVar[int] = 4096
    seeded: ClassVar[bool] = False  # no request, no seed

    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"sampler.max_staleness={self.max_staleness}: at least 0, please")

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        """Endless conversations."""
        raise NotImplementedError

    def group(
        self,
        env: Environment,
        renderer: Renderer,
        rng: Random,
        group_size: int,
        max_seq_len: int,
    ) -> tuple[Rollout, ...]:
        """Return `group_size` conversations as rollouts, each with reward 1.

        `rng` must be derived from seed and index: then no group depends on which came before it.

        Raises:
            TooLong: a hundred one after the other are; one that is, is left out.

        """
        stream = self.conversations(env, rng)
        rollouts: list[Rollout] = []
        too_long = 0
        while len(rollouts) < group_size:
            messages = env.opened(next(stream))
            try:
                rollouts.append(_as_rollout(renderer, messages, env.tool_specs, max_seq_len))
            except TooLong:
                too_long += 1
                if too_long == _TRIES:
                    raise
                log.warning("demonstrations longer than max_seq_len=%d are left out", max_seq_len)
            else:
                too_long = 0
        return tuple(rollouts)


@dataclass(frozen=True, kw_only=True)
class DemonstrationSampler(Imitator):
    """conf/sampler/demonstrations.yaml: what the environment's scripted expert says.

    Attributes:
        corruption_rate: share of conversations whose last answer has two letters swapped.

    """

    corruption_rate: float

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        """Fresh demonstrations."""
        for messages in env.demonstrations(rng):
            yield _corrupted(messages, rng) if rng.random() < self.corruption_rate else messages


def _corrupted(messages: list[Message], rng: Random) -> list[Message]:
    """Swap two neighbouring letters of the last turn, if there are any that differ."""
    *before, last = messages
    text = last.get("content") or ""
    # Equal neighbours would swap into the same text, which is no mistake.
    places = [i for i in range(len(text) - 1) if text[i] != text[i + 1]]
    if not places:
        return messages
    i = rng.choice(places)
    return [*before, {**last, "content": text[:i] + text[i + 1] + text[i] + text[i + 2 :]}]


def _as_rollout(
    renderer: Renderer, messages: list[Message], tools: Any, max_seq_len: int
) -> Rollout:
    """Return a conversation as a rollout with reward 1, which the policy might have played."""
    return Rollout(
        sequences=tokenize(renderer, messages, max_seq_len, tools),
        messages=messages,
        reward=1.0,
        rewards={},
        stop_reason=StopReason.MAX_TOKENS if messages[-1].get("cut_off") else StopReason.STOP,
        turns=sum(message["role"] == "assistant" for message in messages),
        generation_time=0.0,
    )


def tokenize(
    renderer: Renderer, messages: Seq[Any], max_seq_len: int, tools: Any = None
) -> tuple[Sequence, ...]:
    """Return the rows of a conversation: one, unless a later prompt does not extend the last turn.

    Raises:
        TooLong: a row is longer than max_seq_len.
        ValueError: the format cannot express a turn.

    """
    messages = list(messages)
    turn = _first_turn(messages)
    if messages[-1]["role"] != "assistant":
        raise ValueError("a demonstration must end with an assistant message")
    rows: list[Sequence] = []
    token_ids: list[int] = []
    turns: list[int] = []  # of each token, -1 for those of others
    number = 0
    prompt = renderer.render_ids(messages[:turn], tools=tools, add_generation_prompt=True)
    while True:
        if prompt[: len(token_ids)] != token_ids:  # history was rewritten: start another row
            rows.append(_row(token_ids, turns, max_seq_len))
            token_ids, turns = [], []
        completion = completion_ids(renderer, messages[turn])
        turns += [-1] * (len(prompt) - len(turns)) + [number] * len(completion)
        token_ids, number = prompt + completion, number + 1
        following = _next_turn(messages, turn)
        if following is None:
            return (*rows, _row(token_ids, turns, max_seq_len))
        bridged = renderer.bridge_to_next_turn(
            prompt, completion, messages[turn + 1 : following], tools=tools
        )
        turn = following
        prompt = (
            renderer.render_ids(messages[:turn], tools=tools, add_generation_prompt=True)
            if bridged is None
            else bridged.token_ids
        )


def completion_ids(renderer: Renderer, message: Any) -> list[int]:
    """Return what the policy would have sampled to say `message`, stop token included.

    A message that was `cut_off` has none.

    Worked out beside an empty question: no format lets a turn's own tokens depend on its history.
    """
    question: Any = {"role": "user", "content": ""}
    prompt = renderer.render_ids([question], add_generation_prompt=True)
    spoken = [question, message]
    if not _reasons(message):
        # A further question makes the turn history: no empty think block, and formats whose stop
        # token is the next role's marker (GLM) show it.
        spoken.append(question)
    rendered = renderer.render(spoken)
    marks = zip(rendered.sampled_mask, rendered.message_indices, strict=True)
    positions = [i for i, (sampled, owner) in enumerate(marks) if sampled and owner == 1]
    if not positions or rendered.token_ids[: len(prompt)] != prompt:
        raise ValueError(f"the chat format cannot show this demonstrated turn: {message}")
    completion = rendered.token_ids[len(prompt) : positions[-1] + 1]
    if message.get("cut_off"):  # nobody sampled its end
        stops = set(renderer.get_stop_token_ids())
        completion = completion[: next((i for i, t in enumerate(completion) if t in stops), None)]
    return completion


def _reasons(message: Message) -> bool:
    return bool(message.get("reasoning_content")) or "</think>" in (message.get("content") or "")


def _first_turn(messages: Seq[Message]) -> int:
    first = _next_turn(messages, 0)
    if first is None:
        raise ValueError("a demonstration must open with a prompt that an assistant answers")
    return first


def _next_turn(messages: Seq[Message], after: int) -> int | None:
    """Return the index of the first assistant message behind `after`."""
    later = range(after + 1, len(messages))
    return next((i for i in later if messages[i]["role"] == "assistant"), None)


def _row(token_ids: list[int], turns: list[int], max_seq_len: int) -> Sequence:
    if len(token_ids) > max_seq_len:
        raise TooLong(
            f"a demonstration has {len(token_ids)} tokens, but max_seq_len={max_seq_len}: raise "
            "max_seq_len (model.max_seq_len) or make the environment's tasks shorter"
        )
    turns_of = np.array(turns, dtype=np.int32)
    return Sequence(
        token_ids=np.array(token_ids, dtype=np.int32),
        completion_mask=turns_of >= 0,
        turns=turns_of,
        rollout_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        token_versions=np.full(len(token_ids), -1, dtype=np.int32),  # no policy sampled them
    )
