"""Which prompts leave room for an answer, and what stands in the place of those that do not.

    at the start       a few seconds: all of a small data set, the first of a large one
    beside the run     the rest, a fifth of the time; then their number is said, once
    when it is drawn   whatever nobody has looked at yet

A prompt that fills max_seq_len gives a rollout without a token: nothing is learned from it, and it
would be the first to finish. In the place of one that is too long stands another example, drawn by
that place alone: a run that goes on sees the same examples, however far anybody had measured.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from envs.episode import Example
from envs.lazy_examples import LazyExamples
from envs.protocol import Environment, Pool
from rl.sampling.chat import Chat

log = logging.getLogger(__name__)

_WRAP = 64  # tokens that a format puts around one message, generously
_AT_ONCE_S = 0.02  # of measuring beside a run, so that no rollout waits longer
_SHARE = 0.2  # of the time
_TRIES = 100  # draws of a substitute, then one after the other is looked at


class PromptLengths:
    """Measures the prompts of all pools.

    Attributes:
        pools: those given, without the examples whose prompt is too long.

    """

    def __init__(
        self,
        env: Environment,
        pools: Sequence[Pool],
        chat: Chat,
        max_seq_len: int,
        max_prompt_len: int | None = None,
    ) -> None:
        """`max_prompt_len`: of the longest prompt that is taken; None: any that leaves room."""
        lengths = _Lengths(env, chat, max_seq_len, max_prompt_len)
        self._measured = [_Fitting(pool.examples, lengths) for pool in pools]
        self.pools = [
            replace(pool, examples=examples)
            for pool, examples in zip(pools, self._measured, strict=True)
        ]
        self._left = self._measure()

    def measure(self, seconds: float) -> None:
        """Measure for so long, or to the end.

        Raises:
            ValueError: all of a pool are too long.

        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if next(self._left, None) is None:
                return

    async def measure_rest(self) -> None:
        """Measure what is left, without holding up anybody else in this loop."""
        while True:
            began = time.monotonic()
            while time.monotonic() < began + _AT_ONCE_S:
                if next(self._left, None) is None:
                    return
            await asyncio.sleep((time.monotonic() - began) * (1 / _SHARE - 1))

    def _measure(self) -> Iterator[bool]:
        """One prompt at a time; where a pool ends, what there is to say of it."""
        for examples in self._measured:
            for index in range(len(examples)):
                examples.is_long(index)
                yield True
            examples.report()


class _Fitting(LazyExamples):
    """Examples with a substitute for each whose prompt is too long."""

    def __init__(self, examples: Sequence[Example], lengths: "_Lengths") -> None:
        self._examples, self._lengths = examples, lengths
        self._fits = bytearray(len(examples))  # 1 where that is known
        self._long: dict[int, int] = {}  # tokens of those that are too long

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
        """Whether its prompt is too long; measured when it is first asked for."""
        if not self._fits[index] and index not in self._long:
            if tokens := self._lengths.too_long(self._examples[index]):
                self._long[index] = tokens
            else:
                self._fits[index] = 1
        return index in self._long

    def report(self) -> None:
        """Say, once all were measured, how many are left out; ValueError where all are."""
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
    """Measures prompts; those that are short by any account are not tokenized."""

    def __init__(
        self, env: Environment, chat: Chat, max_seq_len: int, max_prompt_len: int | None
    ) -> None:
        self._env, self._chat = env, chat
        self._max_seq_len, self._max_prompt_len = max_seq_len, max_prompt_len
        # The fewest tokens that are too many.
        self._limit = min(max_seq_len, (max_prompt_len or max_seq_len) + 1)
        self._schemas: dict[str, int] = {}  # tokens, by environment

    def too_long(self, example: Example) -> int:
        """Return the tokens of a prompt that has too many; 0 for one that fits, or may."""
        env = self._env.environment_of(example)
        if env.holds_conversation:  # it has a prompt of its own
            return 0
        try:
            messages = env.opened(example.messages)
            # No token is less than a byte.
            texts = [len(str(m.get("content") or "").encode()) for m in messages]
            if self._described(example) + sum(texts) + _WRAP * (len(texts) + 1) < self._limit:
                return 0
            length = self._chat.measure(messages, env.tool_specs)
        except Exception:  # noqa: BLE001 an example that cannot be rendered is its rollouts' error
            return 0
        return length if length is not None and length >= self._limit else 0

    def described_limit(self, example: Example) -> tuple[str, str, str]:
        """What a prompt that is too long does, what helps, and the part of the tools' schemas."""
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
        """Tokens of the tools' schemas in a prompt."""
        env = self._env.environment_of(example)
        if env.name not in self._schemas:
            empty = [{"role": "user", "content": ""}]
            both = [self._chat.measure(empty, specs) for specs in (env.tool_specs, None)]
            self._schemas[env.name] = (both[0] or 0) - (both[1] or 0)
        return self._schemas[env.name]
