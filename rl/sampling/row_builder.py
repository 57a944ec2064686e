"""Build training rows from the turns of one rollout, with exactly the tokens that vLLM saw.

In each turn vLLM receives a prompt and samples a completion. While every prompt starts with all
tokens of the earlier turns, the rollout stays one row. A prompt that changes earlier turns starts a
new row, which is called a fork.
"""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rl.inference.completion import Completion
from rl.records import SampledColumns, TrainingRow, columns_of

_COLUMNS = columns_of(SampledColumns)


class GrowingRow:
    def __init__(self, prompt: object = None, prompt_length: int = 0) -> None:
        self.prompt = prompt  # the first prompt of the row, for `RowBuilder.add_hints`
        self.hinted_prompt: list[int] | None = None
        self.prompt_length = prompt_length  # number of tokens of the row's first prompt
        self.token_ids: list[int] = []  # all tokens of the row so far
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        self._kept: list[Sequence[int]] = []  # ids from which vLLM chose each sampled token

    def extend(self, token_ids: Sequence[int], **values: ArrayLike) -> None:
        """Append tokens. `values`: column -> one value per token. Other columns get fill values."""
        self.token_ids += token_ids
        values = {"token_ids": token_ids, **values}
        for name, column in _COLUMNS.items():
            filled = np.full(len(token_ids), column.fill, column.dtype)
            self._parts[name].append(np.array(values.get(name, filled), column.dtype))

    def extend_sampled(
        self,
        token_ids: Sequence[int],
        turn: int,
        kept: Sequence[Sequence[int]] = (),
        **values: ArrayLike,
    ) -> None:
        count = len(token_ids)
        self._kept += kept or [()] * count
        mask, turns = np.ones(count, np.bool_), np.full(count, turn, np.int32)
        self.extend(token_ids, completion_mask=mask, turns=turns, **values)

    def freeze(self) -> TrainingRow:
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        if (hinted := self.hinted_prompt) is not None:
            # Append the untrained tokens of a prefix, which follow the prompt (prefix.py).
            first = int(columns["completion_mask"].argmax())
            hinted = np.array([*hinted, *self.token_ids[self.prompt_length : first]], np.int32)
        return TrainingRow(**columns, hinted_prompt=hinted, kept=self._padded_kept())

    def _padded_kept(self) -> np.ndarray | None:
        if not any(self._kept):
            return None
        padded = np.full((len(self._kept), max(map(len, self._kept))), -1, np.int32)
        for row, kept in zip(padded, self._kept, strict=True):
            row[: len(kept)] = kept
        return padded


class RowBuilder:
    """The training rows of one rollout, oldest first."""

    def __init__(self) -> None:
        self._rows: list[GrowingRow] = []
        self._num_turns = 0
        self.num_untracked_tokens = 0

    def add_turn(self, completion: Completion, prompt: object = None) -> None:
        """Append a turn to the newest row, or to a new row if the prompt changes earlier tokens."""
        self.num_untracked_tokens += completion.num_untracked_tokens
        prompt_ids = completion.prompt_ids
        row = self._rows[-1] if self._rows else None
        if row is None or prompt_ids[: len(row.token_ids)] != row.token_ids:
            row = GrowingRow(prompt, len(prompt_ids))  # the first row, or a fork
            self._rows.append(row)
        row.extend(prompt_ids[len(row.token_ids) :])
        if masked := completion.num_masked:
            row.extend(completion.token_ids[:masked], turns=[self._num_turns] * masked)
        row.extend_sampled(
            completion.token_ids[masked:],
            self._num_turns,
            completion.kept[masked:],
            rollout_logprobs=completion.logprobs[masked:],
            token_versions=completion.versions[masked:],
        )
        self._num_turns += 1

    async def add_hints(self, hint: Callable[..., Awaitable[list[int]]]) -> None:
        """Set each row's hinted prompt. `hint` adds a hint to a prompt and returns its tokens."""
        for row in self._rows:
            row.hinted_prompt = await hint(row.prompt)

    def freeze(self) -> tuple[TrainingRow, ...]:
        rows = (row.freeze() for row in self._rows)
        return tuple(row for row in rows if row.completion_mask.any())
