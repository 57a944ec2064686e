"""Builds training rows out of the turns of one rollout, so that each row is what the server saw.

Turn by turn the server gets a prompt and samples a completion. While every prompt starts with all
the tokens so far, the rollout stays one row and its cost grows with its length; a prompt that
rewrites history starts a new row (a fork, counted).
"""

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from rl.inference.completion import Completion
from rl.records import Sequence
from rl.sampling.chat import Prompt

Hint = Callable[[Prompt], Awaitable[list[int]]]


@dataclass
class _Row:
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    hinted_prompt: list[int] | None = None

    def extend(
        self, tokens: Items[int], logprobs: Items[float], versions: Items[int], turn: int
    ) -> None:
        chosen = bool(logprobs)  # nobody else's tokens come with any
        self.turns += [turn if chosen else -1] * len(tokens)
        self.token_ids += tokens
        self.mask += [chosen] * len(tokens)
        self.logprobs += logprobs if chosen else [0.0] * len(tokens)
        self.versions += versions if chosen else [-1] * len(tokens)

    def freeze(self) -> Sequence:
        return Sequence(
            token_ids=np.array(self.token_ids, np.int32),
            completion_mask=np.array(self.mask, np.bool_),
            rollout_logprobs=np.array(self.logprobs, np.float32),
            token_versions=np.array(self.versions, np.int32),
            turns=np.array(self.turns, np.int32),
            hinted_prompt=None
            if self.hinted_prompt is None
            else np.array(self.hinted_prompt, np.int32),
        )


class Rows:
    """The rows of one rollout, oldest first."""

    def __init__(self, hints: Hint | None = None) -> None:
        """`hints`: what a reference sees in the place of a prompt; None: what the policy does."""
        self._hints = hints
        self._rows: list[_Row] = []
        self._num_turns = 0
        self.num_untracked_tokens = 0

    def turn(self, completion: Completion) -> None:
        """The server saw the whole prompt and sampled these tokens after it."""
        self.num_untracked_tokens += completion.num_untracked_tokens
        tokens = completion.prompt_ids
        row = self._rows[-1] if self._rows else None
        if row is None or tokens[: len(row.token_ids)] != row.token_ids:
            row = _Row()  # the first, or history was rewritten: a fork
            self._rows.append(row)
        row.extend(tokens[len(row.token_ids) :], [], [], -1)
        row.extend(completion.token_ids, completion.logprobs, completion.versions, self._num_turns)
        self._num_turns += 1

    async def hint(self, prompt: Prompt) -> None:
        """Keep what a reference with hints sees in the place of `prompt`, if that began a row."""
        row = self._rows[-1]  # now: another turn, asked for at once, may begin one meanwhile
        if self._hints is not None and row.hinted_prompt is None:
            row.hinted_prompt = await self._hints(prompt)

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the newest row."""
        return list(self._rows[-1].token_ids) if self._rows else []

    def freeze(self) -> tuple[Sequence, ...]:
        """Return the rows that hold something to train on."""
        return tuple(row.freeze() for row in self._rows if any(row.mask))
