"""Which rollouts have their tokens recorded, and what the rollouts process writes of them.

The trainer's ranks record what they made of the same tokens; all that they know of it is the ids
that come with a batch (rl/run/token_files.py has the format).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.records import Group
from rl.run.folder import RunFolder
from rl.run.token_files import Lines, write_lines


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """conf/record.

    Attributes:
        num_groups: of each step, drawn at random; null: all, and those that the buffer rejected.

    """

    num_groups: int | None

    def choose(self, groups: Sequence[Group], rejected: Sequence[Group], step: int) -> list[Group]:
        """Return those of a step's groups whose tokens are recorded."""
        if self.num_groups is None:
            return [*groups, *rejected]
        # Not the first: they come oldest first, and would always be the stalest.
        return random.Random(step).sample(groups, min(self.num_groups, len(groups)))

    def ids(self, groups: Sequence[Group], recorded: Sequence[Group]) -> tuple[str, ...]:
        """Return what `RankBatch.record_ids` says of a batch."""
        if not recorded:
            return ()
        chosen = {group.index for group in recorded}
        return tuple(
            id if group.index in chosen else "" for group in groups for id in group.rollout_ids
        )

    def write(self, run_folder: RunFolder, step: int, recorded: Sequence[Group]) -> None:
        """Write what was sampled."""
        if not recorded:
            return
        keyed = [
            (id, number, row)
            for group in recorded
            for id, rollout in zip(group.rollout_ids, group.rollouts, strict=True)
            for number, row in enumerate(rollout.sequences)
        ]
        rows = [row for *_, row in keyed]
        columns = {
            "token_ids": [row.token_ids for row in rows],
            "mask": [row.completion_mask for row in rows],
            # Of demonstrations, too, there is none.
            "mu": [np.where(row.token_versions >= 0, row.rollout_logprobs, np.nan) for row in rows],
            "version": [row.token_versions for row in rows],
            "turns": [row.turns for row in rows],
        }
        kinds = {"mask": np.bool_, "mu": np.float32}
        lines = Lines(
            ids=[id for id, *_ in keyed],
            rows=[number for _, number, _ in keyed],
            lengths=[len(row.token_ids) for row in rows],
            columns={
                # Of no row at all there is nothing to take a type from.
                name: np.concatenate([np.empty(0, kinds.get(name, np.int32)), *values]).astype(
                    kinds.get(name, np.int32), copy=False
                )
                for name, values in columns.items()
            },
        )
        write_lines(run_folder.tokens_of(step, "rollouts"), lines)
