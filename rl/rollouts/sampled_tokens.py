"""Choose the rollouts whose tokens are recorded, and write the values that sampling gave them.

The trainer ranks write the values that training computes for the same tokens. They find the chosen
rollouts in `RankBatch.record_ids`. rl/runtime/token_files.py describes the files.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.config.ranges import NonNegativeInt
from rl.records import Group, SampledColumns, TrainingRow, columns_of
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, write_lines


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    num_groups: NonNegativeInt | None  # groups recorded per step; None: all, also rejected groups

    def choose(self, groups: Sequence[Group], rejected: Sequence[Group], step: int) -> list[Group]:
        if self.num_groups is None:
            return [*groups, *rejected]
        # Draw at random, because the first groups are the oldest and have the stalest tokens.
        return random.Random(step).sample(groups, min(self.num_groups, len(groups)))

    def ids(self, groups: Sequence[Group], recorded: Sequence[Group]) -> tuple[str, ...]:
        """Return one id per rollout, "" for an unrecorded rollout, or () if nothing is recorded."""
        if not recorded:
            return ()
        chosen = {group.index for group in recorded}
        return tuple(
            id if group.index in chosen else "" for group in groups for id in group.rollout_ids
        )

    def write(self, run_folder: RunFolder, step: int, recorded: Sequence[Group]) -> None:
        if not recorded:
            return
        keyed = [
            (id, number, row)
            for group in recorded
            for id, rollout in zip(group.rollout_ids, group.rollouts, strict=True)
            for number, row in enumerate(rollout.rows)
        ]
        rows = [row for *_, row in keyed]
        lines = Lines(
            ids=[id for id, *_ in keyed],
            rows=[number for _, number, _ in keyed],
            lengths=[len(row.token_ids) for row in rows],
            columns={
                # The empty array sets the dtype if there are no rows.
                column.recorded_as: np.concatenate(
                    [np.empty(0, column.dtype), *(_recorded_values(row, name) for row in rows)]
                )
                for name, column in columns_of(SampledColumns).items()
                if column.recorded_as
            },
        )
        write_lines(run_folder.tokens_of(step, "rollouts"), lines)


def _recorded_values(row: TrainingRow, name: str) -> np.ndarray:
    """Return the row's column `name`. Floats are NaN for tokens that no policy sampled."""
    values = getattr(row, name)
    if not np.issubdtype(values.dtype, np.floating):
        return values
    return np.where(row.token_versions >= 0, values, np.float32(np.nan))
