"""Replace examples whose prompts fill max_seq_len or exceed max_prompt_len.

A rollout whose prompt fills max_seq_len has no token to train. So FittingExamples counts the tokens
of a prompt when its example is drawn, and returns another example if the prompt is too long.
The choice depends only on the data and the example's index, so a resumed run makes it again.
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


class FittingExamples(LazyExamples):
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
        self._limit = min(max_seq_len, (max_prompt_len or max_seq_len) + 1)  # too long if >= this
        if max_prompt_len is None:
            remedy = "raise max_seq_len (and model.max_seq_len, if it is less)"
            self._problem = f"fill max_seq_len={max_seq_len}: {remedy}"
        else:
            problem = f"have more tokens than sampler.max_prompt_len={max_prompt_len}"
            self._problem = f"{problem}: raise it, or set sampler.max_prompt_len=null"
        self._too_long: dict[int, int] = {}  # index -> number of tokens if too long, else 0
        self._num_too_long = 0
        if examples:
            self.example_at(0)  # raises ValueError now, not in training, if no prompt fits

    def __len__(self) -> int:
        return len(self._examples)

    def example_at(self, index: int) -> Example:
        rng = Random(f"substitute:{index}")
        draws = (rng.randrange(len(self)) for _ in range(100))
        # If no random draw fits, all examples are tried in order, because very few may fit.
        for tried in chain([index], draws, range(len(self))):
            if not self._num_tokens_if_too_long(tried):
                return self._examples[tried]
        shortest = min(self._too_long.values())
        raise ValueError(
            f"all {len(self)} prompts of env {self._examples[index].env!r} {self._problem}. "
            f"The shortest has {shortest} tokens"
        )

    def _num_tokens_if_too_long(self, index: int) -> int:
        if index not in self._too_long:
            example = self._examples[index]
            tokens = self._too_long[index] = self._count_tokens_if_too_long(example)
            self._num_too_long += tokens > 0
            if tokens and self._num_too_long.bit_count() == 1:  # warn at the 1st, 2nd, 4th, ...
                log.warning(
                    "%d of %d prompts of env %r that were drawn are replaced, because they %s. "
                    "The last one has %d tokens",
                    *(self._num_too_long, len(self._too_long), example.env, self._problem, tokens),
                )
        return self._too_long[index]

    def _count_tokens_if_too_long(self, example: Example) -> int:
        """Return the number of tokens if the prompt is too long; 0 if it fits or counting fails."""
        env = self._env.environment_of(example)
        if env.holds_conversation:  # the environment writes the prompt only during the episode
            return 0
        try:
            messages = env.add_system_prompt(example.messages)
            length = self._chat.num_prompt_tokens(messages, env.tool_specs)
        except Exception:  # noqa: BLE001 playing the example raises the same error and reports it
            return 0
        return length if length is not None and length >= self._limit else 0
