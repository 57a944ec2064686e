"""Replaces examples whose prompts are too long for an answer.

A rollout whose prompt fills max_seq_len has no completion token and teaches nothing. Each prompt is
therefore measured when its example is drawn. If the prompt is too long, another example of the pool
is used. The choice depends only on the position, so a resumed run uses the same examples.
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

_MAX_REPLACEMENTS = 100  # maximum number of random replacements that are tried for one example


class FittingExamples(LazyExamples):
    """The examples of a pool, in which examples with too long prompts are replaced."""

    def __init__(
        self,
        examples: Sequence[Example],
        env: Environment,
        chat: Chat,
        max_seq_len: int,
        max_prompt_len: int | None,
    ) -> None:
        """`max_prompt_len`: maximum tokens of a prompt; None: any number below max_seq_len."""
        self._examples, self._env, self._chat = examples, env, chat
        # Prompts with this number of tokens or more are replaced.
        self._limit = min(max_seq_len, (max_prompt_len or max_seq_len) + 1)
        if max_prompt_len is None:
            self._problem = f"fill max_seq_len={max_seq_len}: raise model.max_seq_len"
        else:
            problem = f"have more tokens than sampler.max_prompt_len={max_prompt_len}"
            self._problem = f"{problem}: raise it, or set it to null"
        self._measured: dict[int, int] = {}  # example index -> length of a too long prompt, else 0
        self._num_long = 0
        if examples:
            self.made(0)  # raises ValueError before vLLM starts if no prompt can be used

    def __len__(self) -> int:
        return len(self._examples)

    def made(self, index: int) -> Example:
        rng = Random(f"substitute:{index}")
        draws = (rng.randrange(len(self)) for _ in range(_MAX_REPLACEMENTS))
        # Few prompts may fit, so all are tried in order after the draws.
        for tried in chain([index], draws, range(len(self))):
            if not self._too_long_length(tried):
                return self._examples[tried]
        shortest = min(self._measured.values())
        raise ValueError(
            f"all {len(self)} prompts of env {self._examples[index].env!r} {self._problem}. "
            f"The shortest has {shortest} tokens"
        )

    def _too_long_length(self, index: int) -> int:
        """Return the number of tokens of a too long prompt, 0 if it fits; cache the result."""
        if index not in self._measured:
            example = self._examples[index]
            tokens = self._measured[index] = self._measure_too_long(example)
            self._num_long += tokens > 0
            if tokens and self._num_long.bit_count() == 1:  # warn at 1, 2, 4, ... long prompts
                log.warning(
                    "%d of %d prompts of env %r that were drawn are replaced, because they %s. "
                    "The last one has %d tokens",
                    *(self._num_long, len(self._measured), example.env, self._problem, tokens),
                )
        return self._measured[index]

    def _measure_too_long(self, example: Example) -> int:
        """Return the number of tokens of a too long prompt; 0 if it fits or cannot be measured."""
        env = self._env.environment_of(example)
        if env.holds_conversation:  # the environment builds the prompt during the episode
            return 0
        try:
            length = self._chat.measure(env.opened(example.messages), env.tool_specs)
        except Exception:  # noqa: BLE001 the rollouts of the example report the error
            return 0
        return length if length is not None and length >= self._limit else 0
