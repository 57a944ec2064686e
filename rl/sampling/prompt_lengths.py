"""Measures prompts, and replaces examples whose prompt leaves no room for an answer.

    at the start       a few seconds: all of a small data set, the first of a large one
    during the run     the rest, in a fifth of the time; then one message reports their number
    when it is drawn   an example that was not measured yet

A prompt that fills max_seq_len gives a rollout without a token, which teaches nothing and would be
the first to finish. Another example replaces it. The replacement depends on the position alone, so
that a resumed run sees the same examples.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from envs.episode import Example
from envs.loading import LazyExamples
from envs.protocol import Environment, Pool
from rl.sampling.chat import Chat

log = logging.getLogger(__name__)

_WRAP = 64  # an upper bound of the tokens that a format adds to one message
_AT_ONCE_S = 0.02  # of measuring during a run, which blocks all rollouts
_SHARE = 0.2  # of the time
_TRIES = 100  # random draws of a replacement; then the examples are tried in order


class PromptLengths:
    """Measures the prompts of all pools.

    Attributes:
        pools: the pools with replacements for the examples whose prompt is too long.

    """

    def __init__(
        self,
        env: Environment,
        pools: Sequence[Pool],
        chat: Chat,
        max_seq_len: int,
        max_prompt_len: int | None = None,
    ) -> None:
        """`max_prompt_len`: the longest prompt that is used; None: any that leaves room."""
        lengths = _Lengths(env, chat, max_seq_len, max_prompt_len)
        self._measured = [_Fitting(pool.examples, lengths) for pool in pools]
        self.pools = [
            replace(pool, examples=examples)
            for pool, examples in zip(pools, self._measured, strict=True)
        ]
        self._left = self._measure()

    def measure(self, seconds: float) -> None:
        """Measure for this time, or until all are measured.

        Raises:
            ValueError: all prompts of a pool are too long.

        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if next(self._left, None) is None:
                return

    async def measure_rest(self) -> None:
        """Measure the remaining prompts, in short blocks of the event loop."""
        while True:
            began = time.monotonic()
            while time.monotonic() < began + _AT_ONCE_S:
                if next(self._left, None) is None:
                    return
            await asyncio.sleep((time.monotonic() - began) * (1 / _SHARE - 1))

    def _measure(self) -> Iterator[bool]:
        """Measure one prompt per step, and report at the end of each pool."""
        for examples in self._measured:
            for index in range(len(examples)):
                examples.is_long(index)
                yield True
            examples.report()


class _Fitting(LazyExamples):
    """Examples with a replacement for each whose prompt is too long."""

    def __init__(self, examples: Sequence[Example], lengths: "_Lengths") -> None:
        self._examples, self._lengths = examples, lengths
        self._fits = bytearray(len(examples))  # 1 if the prompt is known to fit
        self._long: dict[int, int] = {}  # index -> tokens of a prompt that is too long

    def __len__(self) -> int:
        return len(self._examples)

    def made(self, index: int) -> Example:
        if not self.is_long(index):
            return self._examples[index]
        rng = Random(f"substitute:{index}")
        tried = [rng.randrange(len(self)) for _ in range(_TRIES)]
        for other in (*tried, *range(len(self))):
            if not self.is_long(other):
                return self._examples[other]
        raise ValueError(self._nothing_fits())

    def is_long(self, index: int) -> bool:
        """Return whether the prompt is too long; measure it at the first call."""
        if not self._fits[index] and index not in self._long:
            if tokens := self._lengths.too_long(self._examples[index]):
                self._long[index] = tokens
            else:
                self._fits[index] = 1
        return index in self._long

    def report(self) -> None:
        """Warn how many prompts are left out, after all are measured; ValueError if all are."""
        if not self._long:
            return
        if len(self._long) == len(self):
            raise ValueError(self._nothing_fits())
        what, remedy, schemas = self._lengths.described_limit(self._examples[0])
        log.warning(
            "%d of %d prompts of env %r %s and are left out: the longest has %d tokens%s: %s",
            *(len(self._long), len(self), self._examples[0].env, what),
            *(max(self._long.values()), schemas, remedy),
        )

    def _nothing_fits(self) -> str:
        what, remedy, schemas = self._lengths.described_limit(self._examples[0])
        return (
            f"all {len(self)} prompts of env {self._examples[0].env!r} {what}, so nothing can be "
            f"answered: the shortest has {min(self._long.values())} tokens{schemas}: {remedy}"
        )


class _Lengths:
    """Measures prompts; prompts with few bytes are not tokenized."""

    def __init__(
        self, env: Environment, chat: Chat, max_seq_len: int, max_prompt_len: int | None
    ) -> None:
        self._env, self._chat = env, chat
        self._max_seq_len, self._max_prompt_len = max_seq_len, max_prompt_len
        # The smallest number of tokens that is too many.
        self._limit = min(max_seq_len, (max_prompt_len or max_seq_len) + 1)
        self._schemas: dict[str, int] = {}  # tokens, by environment

    def too_long(self, example: Example) -> int:
        """Return the tokens of a prompt that is too long; 0 if it fits, or if that is unknown."""
        env = self._env.environment_of(example)
        if env.holds_conversation:  # the environment builds its own prompt
            return 0
        try:
            messages = env.opened(example.messages)
            # A token has at least one byte.
            texts = [len(str(m.get("content") or "").encode()) for m in messages]
            if self._described(example) + sum(texts) + _WRAP * (len(texts) + 1) < self._limit:
                return 0
            length = self._chat.measure(messages, env.tool_specs)
        except Exception:  # noqa: BLE001 the rollouts of the example report the error
            return 0
        return length if length is not None and length >= self._limit else 0

    def described_limit(self, example: Example) -> tuple[str, str, str]:
        """Return the problem of a long prompt, the remedy, and the tokens of tool schemas."""
        described = self._described(example)
        if self._max_prompt_len is None:
            what = "fill max_seq_len"
            remedy = f"raise model.max_seq_len (max_seq_len={self._max_seq_len})"
        else:
            what = f"have more tokens than sampler.max_prompt_len={self._max_prompt_len}"
            remedy = "raise it, or set it to null"
        if described:
            remedy += ", or leave the schemas out (model.describe_tools=false)"
        return what, remedy, f", {described} of them the tools' schemas" if described else ""

    def _described(self, example: Example) -> int:
        """Return the tokens of the tools' schemas in a prompt."""
        env = self._env.environment_of(example)
        if env.name not in self._schemas:
            empty = [{"role": "user", "content": ""}]
            both = [self._chat.measure(empty, specs) for specs in (env.tool_specs, None)]
            self._schemas[env.name] = (both[0] or 0) - (both[1] or 0)
        return self._schemas[env.name]
