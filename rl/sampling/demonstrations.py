"""Samplers that turn conversations into rollouts without a policy, for supervised training.

A demonstration gets the same tokens as a rollout in which the policy wrote the expert's answers.
Each prompt is rendered as in a rollout (`render_ids(..., add_generation_prompt=True)`, then
`bridge_to_next_turn`). Only the tokens of the answers are trained, with their stop tokens.

The conversation is not rendered in one call, because Qwen3's format would add an empty think block
to the last answer. The prompts of rollouts do not contain this block, so the policy would be
trained to write it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, ClassVar

from renderers import Renderer

from envs.episode import StopReason
from envs.messages import Message, check_messages
from envs.protocol import Environment
from losses.groups import Source
from rl.config.ranges import NonNegativeInt, Probability
from rl.records import Rollout, TrainingRow
from rl.sampling.row_builder import GrowingRow

log = logging.getLogger(__name__)

_MAX_TOO_LONG = 100  # the run ends after this many consecutive conversations that are too long
_NUM_SKIPPED = count(1)  # counts the conversations that were too long


class ConversationTooLong(ValueError):
    """The error raised if a conversation has a training row longer than max_seq_len."""


@dataclass(frozen=True, kw_only=True)
class ImitationSampler:
    """Base class of samplers that read or generate conversations without vLLM."""

    uses_vllm: ClassVar[bool] = False
    temperature: ClassVar[float] = 1.0  # the trainer divides all logits by this number
    max_concurrent: ClassVar[int] = 4096
    seeded: ClassVar[bool] = False  # no request needs a seed, because vLLM is not used

    max_staleness: NonNegativeInt

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        """Yield conversations endlessly."""
        raise NotImplementedError

    def group(
        self, env: Environment, renderer: Renderer, rng: Random, group_size: int, max_seq_len: int
    ) -> tuple[Rollout, ...]:
        """Return `group_size` rollouts with reward 1. Skip conversations that are too long."""
        stream = self.conversations(env, rng)
        rollouts: list[Rollout] = []
        too_long = 0
        while len(rollouts) < group_size:
            # Pass a default, because StopIteration would become a RuntimeError in a coroutine.
            if (conversation := next(stream, None)) is None:
                raise ValueError(
                    f"the conversations of the environment {env.name!r} ended, but a group needs "
                    f"{group_size}: let demonstrations() yield endlessly, for example choose "
                    "a conversation with rng in a loop `while True`"
                )
            messages = env.add_system_prompt(conversation)
            try:
                rows = tokenize(renderer, messages, max_seq_len, env.tool_specs)
            except ConversationTooLong as error:
                too_long += 1
                if too_long == _MAX_TOO_LONG:
                    raise
                if (number := next(_NUM_SKIPPED)).bit_count() == 1:  # the 1st, 2nd, 4th, ...
                    log.warning("demonstrations skipped so far: %d. Newest: %s", number, error)
                continue
            too_long = 0
            cut = messages[-1].get("cut_off")
            rollouts.append(
                Rollout(
                    rows=rows,
                    messages=messages,
                    reward=1.0,
                    rewards={},
                    stop_reason=StopReason.MAX_TOKENS if cut else StopReason.STOP,
                    turns=sum(message["role"] == "assistant" for message in messages),
                    generation_time=0.0,
                    source=Source.DEMONSTRATION,
                )
            )
        return tuple(rollouts)


@dataclass(frozen=True, kw_only=True)
class DemonstrationSampler(ImitationSampler):
    """The sampler of conf/sampler/demonstrations.yaml. It reads `env.demonstrations`."""

    corruption_rate: Probability

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        for messages in env.demonstrations(rng):
            yield _swap_letters(messages, rng) if rng.random() < self.corruption_rate else messages


def _swap_letters(messages: list[Message], rng: Random) -> list[Message]:
    *before, last = messages
    text = last.get("content") or ""
    positions = [i for i in range(len(text) - 1) if text[i] != text[i + 1]]
    if not positions:
        return messages
    i = rng.choice(positions)
    return [*before, {**last, "content": text[:i] + text[i + 1] + text[i] + text[i + 2 :]}]


def tokenize(
    renderer: Renderer, messages: Sequence[Any], max_seq_len: int, tools: Any = None
) -> tuple[TrainingRow, ...]:
    """Return the training rows of a conversation: several if the template changes earlier turns."""
    messages = list(messages)
    check_messages(messages, "a demonstration")
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if turns[-1:] != [len(messages) - 1]:
        raise ValueError("a demonstration ends without an answer of the assistant: append one")

    def render_until(turn: int) -> list[int]:
        return renderer.render_ids(messages[:turn], tools=tools, add_generation_prompt=True)

    rows, prompt = [GrowingRow()], render_until(turns[0])
    for number, (turn, following) in enumerate(zip(turns, [*turns[1:], None], strict=True)):
        if prompt[: len(rows[-1].token_ids)] != rows[-1].token_ids:
            rows.append(GrowingRow())  # the prompt changes earlier turns, so a new row begins
        completion = completion_ids(renderer, messages[turn])
        rows[-1].extend(prompt[len(rows[-1].token_ids) :])
        rows[-1].extend_sampled(completion, number)
        if following is not None:
            reply = messages[turn + 1 : following]
            bridged = renderer.bridge_to_next_turn(prompt, completion, reply, tools=tools)
            prompt = render_until(following) if bridged is None else bridged.token_ids
    longest = max(len(row.token_ids) for row in rows)
    if longest > max_seq_len:
        raise ConversationTooLong(
            f"the demonstration after {str(messages[turns[0] - 1].get('content'))[:50]!r} has "
            f"{longest} tokens, but max_seq_len={max_seq_len}: set max_seq_len={longest} or more "
            "(and model.max_seq_len, if it is less), or use shorter demonstrations"
        )
    return tuple(row.freeze() for row in rows)


def completion_ids(renderer: Renderer, message: Any) -> list[int]:
    """Return the tokens that the policy would have sampled for `message`.

    The stop token is included unless the message is `cut_off`. The message is rendered after an
    empty question. This suffices, because the tokens of a turn do not depend on earlier turns.
    """
    question: Any = {"role": "user", "content": ""}
    prompt = renderer.render_ids([question], add_generation_prompt=True)
    conversation = [question, message]
    if not message.get("reasoning_content") and "</think>" not in (message.get("content") or ""):
        # Render a second question after the message, because some formats add an empty think block
        # to the last message, and GLM's stop token is the role token of the following message.
        conversation.append(question)
    rendered = renderer.render(conversation)
    owners = zip(rendered.sampled_mask, rendered.message_indices, strict=True)
    positions = [i for i, (sampled, owner) in enumerate(owners) if sampled and owner == 1]
    if not positions or rendered.token_ids[: len(prompt)] != prompt:
        raise ValueError(
            f"the chat format cannot render the turn {message}: change or remove this demonstration"
        )
    completion = rendered.token_ids[len(prompt) : positions[-1] + 1]
    if message.get("cut_off"):  # remove the stop token
        stops = set(renderer.get_stop_token_ids())
        completion = completion[: next((i for i, t in enumerate(completion) if t in stops), None)]
    return completion
