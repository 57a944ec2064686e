"""Builds groups from an environment's demonstrations instead of sampling, for supervised training.

A demonstration becomes the tokens of a rollout in which the policy answered like the expert. The
prompts are those of a rollout (`render_ids(..., add_generation_prompt=True)`, then the renderer's
bridge from turn to turn). Only the policy's tokens are trained, the stop token included.

The conversation is not rendered as a whole, because Qwen3's format adds an empty think block to the
last assistant turn. A prompt does not have this block, so the policy would learn to write it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from renderers import Renderer

from envs.episode import StopReason
from envs.messages import Message
from envs.protocol import Environment
from rl.config.ranges import NonNegativeInt, Probability
from rl.records import Rollout, TrainingRow
from rl.sampling.row_builder import GrowingRow

log = logging.getLogger(__name__)

_MAX_TOO_LONG = 100  # maximum number of consecutive conversations that are too long


class TooLong(ValueError):
    """A conversation has a training row that is longer than max_seq_len."""


@dataclass(frozen=True, kw_only=True)
class Imitator:
    """Base class of samplers that read or generate conversations without vLLM.

    Attributes:
        max_staleness: number of batches that are prepared ahead of the trainer.
    """

    uses_vllm: ClassVar[bool] = False
    temperature: ClassVar[float] = 1.0  # 1.0 does not change the trainer's logits
    max_concurrent: ClassVar[int] = 4096
    seeded: ClassVar[bool] = False  # whether requests have seeds, as vLLM requests do

    max_staleness: NonNegativeInt

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        """Yield an endless sequence of conversations."""
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

        `rng` must be derived from the run's seed and the group's index, so that no group depends on
        earlier groups. A conversation that is too long is skipped with a warning.

        Raises:
            TooLong: 100 consecutive conversations are too long.
        """
        stream = self.conversations(env, rng)
        rollouts: list[Rollout] = []
        too_long = 0
        while len(rollouts) < group_size:
            messages = env.opened(next(stream))
            try:
                rows = tokenize(renderer, messages, max_seq_len, env.tool_specs)
            except TooLong:
                too_long += 1
                if too_long == _MAX_TOO_LONG:
                    raise
                log.warning("demonstrations longer than max_seq_len=%d are left out", max_seq_len)
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
                )
            )
        return tuple(rollouts)


@dataclass(frozen=True, kw_only=True)
class DemonstrationSampler(Imitator):
    """The sampler that trains on the answers of the environment's scripted expert.

    Attributes:
        corruption_rate: share of conversations with two swapped letters in the last answer.
    """

    corruption_rate: Probability

    def conversations(self, env: Environment, rng: Random) -> Iterator[list[Message]]:
        """Yield demonstrations of the expert, of which a share `corruption_rate` is corrupted."""
        for messages in env.demonstrations(rng):
            yield _corrupted(messages, rng) if rng.random() < self.corruption_rate else messages


def _corrupted(messages: list[Message], rng: Random) -> list[Message]:
    """Swap two different neighbouring letters of the last turn, if there are any."""
    *before, last = messages
    text = last.get("content") or ""
    # A swap of equal neighbours would not change the text.
    places = [i for i in range(len(text) - 1) if text[i] != text[i + 1]]
    if not places:
        return messages
    i = rng.choice(places)
    return [*before, {**last, "content": text[:i] + text[i + 1] + text[i] + text[i + 2 :]}]


def tokenize(
    renderer: Renderer, messages: Sequence[Any], max_seq_len: int, tools: Any = None
) -> tuple[TrainingRow, ...]:
    """Return the training rows of a conversation: several rows if later prompts rewrite history.

    Raises:
        TooLong: a row is longer than max_seq_len.
        ValueError: the chat format cannot express a turn.
    """
    messages = list(messages)
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not turns:
        raise ValueError("a demonstration must open with a prompt that an assistant answers")
    if messages[-1]["role"] != "assistant":
        raise ValueError("a demonstration must end with an assistant message")

    def rendered(turn: int) -> list[int]:
        return renderer.render_ids(messages[:turn], tools=tools, add_generation_prompt=True)

    rows, prompt = [GrowingRow()], rendered(turns[0])
    for number, (turn, following) in enumerate(zip(turns, [*turns[1:], None], strict=True)):
        if prompt[: len(rows[-1].token_ids)] != rows[-1].token_ids:
            rows.append(GrowingRow())  # begin a fork, because the prompt rewrites history
        completion = completion_ids(renderer, messages[turn])
        rows[-1].extend(prompt[len(rows[-1].token_ids) :])
        rows[-1].sampled(completion, number)
        if following is not None:
            reply = messages[turn + 1 : following]
            bridged = renderer.bridge_to_next_turn(prompt, completion, reply, tools=tools)
            prompt = rendered(following) if bridged is None else bridged.token_ids
    longest = max(len(row.token_ids) for row in rows)
    if longest > max_seq_len:
        raise TooLong(
            f"a demonstration has {longest} tokens, but max_seq_len={max_seq_len}: raise "
            "max_seq_len (model.max_seq_len) or make the environment's tasks shorter"
        )
    return tuple(row.freeze() for row in rows)


def completion_ids(renderer: Renderer, message: Any) -> list[int]:
    """Return the tokens that the policy would have sampled for `message`.

    The stop token is included unless the message is `cut_off`. An empty question replaces the
    earlier turns, because in every chat format a turn's tokens do not depend on earlier turns.
    """
    question: Any = {"role": "user", "content": ""}
    prompt = renderer.render_ids([question], add_generation_prompt=True)
    conversation = [question, message]
    if not _has_reasoning(message):
        # A question follows the message. Otherwise formats add an empty think block, and GLM omits
        # the stop token, because its stop token is the marker of the next role.
        conversation.append(question)
    rendered = renderer.render(conversation)
    owners = zip(rendered.sampled_mask, rendered.message_indices, strict=True)
    positions = [i for i, (sampled, owner) in enumerate(owners) if sampled and owner == 1]
    if not positions or rendered.token_ids[: len(prompt)] != prompt:
        raise ValueError(f"the chat format cannot show this demonstrated turn: {message}")
    completion = rendered.token_ids[len(prompt) : positions[-1] + 1]
    if message.get("cut_off"):  # remove the stop token
        stops = set(renderer.get_stop_token_ids())
        completion = completion[: next((i for i, t in enumerate(completion) if t in stops), None)]
    return completion


def _has_reasoning(message: Message) -> bool:
    return bool(message.get("reasoning_content")) or "</think>" in (message.get("content") or "")
