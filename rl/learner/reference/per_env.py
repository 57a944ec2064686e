"""One teacher per environment of a mixture. Each teacher scores the rows of its environment.

N: completion tokens of a micro-batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rl.learner.logprobs import Logprobs, Rows
from rl.learner.reference.protocol import Reference, ReferenceSetting, join_scores


class ReferenceChoice(Protocol):
    def start(self, setting: ReferenceSetting) -> Reference: ...


@dataclass(frozen=True, kw_only=True)
class PerEnvironment:
    teachers: Mapping[str, ReferenceChoice]  # by the name of their environment

    def start(self, setting: ReferenceSetting) -> Reference:
        return _Teachers({name: teacher.start(setting) for name, teacher in self.teachers.items()})


class _Teachers(Reference):
    def __init__(self, teachers: Mapping[str, Reference]) -> None:
        self._teachers = teachers
        self.shares_prefixes = all(teacher.shares_prefixes for teacher in teachers.values())

    def score(self, batches: Sequence[Rows]) -> list[Logprobs]:
        # Call each teacher for each micro-batch, because ZeRO-3 needs equal calls on all ranks. A
        # teacher without rows in a micro-batch gets one row without scored tokens.
        scored = {
            name: teacher.score([_rows_of_env(name, rows) for rows in batches])
            for name, teacher in self._teachers.items()
        }
        return [
            _merge_in_row_order(rows, {name: scores[i] for name, scores in scored.items()})
            for i, rows in enumerate(batches)
        ]

    def metrics(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for teacher in self._teachers.values():
            total.update(teacher.metrics())
        return dict(total)

    def after_step(self, step: int) -> None:
        for teacher in self._teachers.values():
            teacher.after_step(step)

    def save(self, folder: Path) -> None:
        for i, teacher in enumerate(self._teachers.values()):
            teacher.save(_folder_of(folder, i))

    def load(self, folder: Path) -> None:
        for i, teacher in enumerate(self._teachers.values()):
            teacher.load(_folder_of(folder, i))


def _folder_of(folder: Path, i: int) -> Path:
    """Create and return a folder for teacher `i`, because teachers may use the same file names."""
    own = folder / f"reference_{i}"
    own.mkdir(exist_ok=True)
    return own


def _rows_of_env(name: str, rows: Rows) -> Rows:
    own = [i for i, env in enumerate(rows.envs) if env == name]
    if own:
        is_own = torch.tensor([env == name for env in rows.envs], device=rows.mask.device)  # [B]
        chosen = is_own[rows.mask.nonzero()[:, 0]]  # [N]
        by_token = (x if x is None else x[chosen] for x in (rows.temperatures, rows.kept))
        return Rows(rows.token_ids[own], rows.mask[own], (name,) * len(own), *by_token)
    return Rows(rows.token_ids[:1, :2], torch.zeros_like(rows.mask[:1, :2]), ("",))


def _merge_in_row_order(rows: Rows, by_env: Mapping[str, Logprobs]) -> Logprobs:
    envs = [rows.envs[i] for i in rows.mask.nonzero()[:, 0].tolist()]  # [N]
    numbers = torch.tensor([list(by_env).index(env) for env in envs], dtype=torch.int64)
    # The scores are concatenated teacher by teacher. order[i] is the index of score i in row order.
    order = numbers.argsort(stable=True).to(rows.mask.device)  # [N]

    def reorder(scores: Tensor) -> Tensor:
        result = torch.empty_like(scores)
        result[order] = scores
        return result

    return join_scores(list(by_env.values()), reorder)
