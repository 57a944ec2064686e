"""Replaces examples whose prompt leaves no room for an answer.

A prompt that fills max_seq_len gives a rollout without a token, which teaches nothing and would be
the first to finish. Each prompt is measured when its example is drawn, and another example replaces
it if it is too long. The replacement depends on the position alone, so that a resumed run sees the
same examples.
"""

import logging
from collections.abc import Sequence
from itertools import chain
from random import Random

from envs.episode import Example
from envs.loading import LazyExamples
from envs.protocol import Environment
from rl.sampling.chat import Chat

log = logging.getLogger(__name__)

_TRIES = 100  # random draws of a replacement


class FittingExamples(LazyExamples):
    """The examples of a pool; another example replaces each whose prompt is too long."""

    def __init__(
        self,
        examples: Sequence[Example],
        env: Environment,
        chat: Chat,
        max_seq_len: int,
        max_prompt_len: int | None,
    ) -> None:
        """`max_prompt_len`: the longest prompt that is used; None: any that leaves room."""
        self._examples, self._env, self._chat = examples, env, chat
        # The smallest number of tokens that is too many.
        self._limit = min(max_seq_len, (max_prompt_len or max_seq_len) + 1)
        if max_prompt_len is None:
            self._problem = f"fill max_seq_len={max_seq_len}: raise model.max_seq_len"
        else:
            problem = f"have more tokens than sampler.max_prompt_len={max_prompt_len}"
            self._problem = f"{problem}: raise it, or set it to null"
        self._measured: dict[int, int] = {}  # index -> tokens of a prompt that is too long, or 0
        self._num_long = 0
        if examples:
            self.made(0)  # refuses a data set without a usable prompt before vLLM has started

    def __len__(self) -> int:
        return len(self._examples)

    def made(self, index: int) -> Example:
        rng = Random(f"substitute:{index}")
        draws = (rng.randrange(len(self)) for _ in range(_TRIES))
        # Few prompts may fit, so all are tried in order after the draws.
        for tried in chain([index], draws, range(len(self))):
            if not self._excess(tried):
                return self._examples[tried]
        shortest = min(self._measured.values())
        raise ValueError(
            f"all {len(self)} prompts of env {self._examples[index].env!r} {self._problem}. "
            f"The shortest has {shortest} tokens"
        )

    def _excess(self, index: int) -> int:
        """Return the tokens of a prompt that is too long, or 0; measure it at the first call."""
        if index not in self._measured:
            example = self._examples[index]
            tokens = self._measured[index] = self._length_of_long(example)
            self._num_long += tokens > 0
            if tokens and self._num_long.bit_count() == 1:  # 1, 2, 4, ... of them
                log.warning(
                    "%d of %d prompts of env %r that were drawn are replaced, because they %s. "
                    "The last one has %d tokens",
                    *(self._num_long, len(self._measured), example.env, self._problem, tokens),
                )
        return self._measured[index]

    def _length_of_long(self, example: Example) -> int:
        """Return the tokens of a prompt that is too long; 0 if it fits, or if that is unknown."""
        env = self._env.environment_of(example)
        if env.holds_conversation:  # the environment builds its own prompt
            return 0
        try:
            length = self._chat.measure(env.opened(example.messages), env.tool_specs)
        except Exception:  # noqa: BLE001 the rollouts of the example report the error
            return 0
        return length if length is not None and length >= self._limit else 0
