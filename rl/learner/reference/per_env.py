"""A teacher for each environment of a mixture: a row is scored by that of its environment.

B: rows, N: completion tokens of a micro-batch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rl.learner.reference.protocol import Reference, ReferenceSetting
from rl.learner.rows import Rows, Scores
from rl.run.failure import RunFailed


class Teacher(Protocol):
    """Another choice of conf/reference."""

    def start(self, setting: ReferenceSetting) -> Reference:
        """Load it, or connect."""
        ...


@dataclass(frozen=True, kw_only=True)
class PerEnvironment:
    """conf/reference/per_env.yaml.

    Attributes:
        teachers: by the name of the environment.

    """

    teachers: Mapping[str, Teacher]

    def start(self, setting: ReferenceSetting) -> Reference:
        """Start all of them."""
        return _Several({name: teacher.start(setting) for name, teacher in self.teachers.items()})


class _Several:
    def __init__(self, teachers: Mapping[str, Reference]) -> None:
        self._teachers = teachers

    def score(self, batches: Sequence[Rows]) -> list[Scores]:
        # Every teacher gets every micro-batch, if only an empty row of it: under ZeRO-3 the base
        # of an adapter is scored by all ranks together, whatever environments a rank has.
        scored = {
            name: teacher.score([_of(name, rows) for rows in batches])
            for name, teacher in self._teachers.items()
        }
        return [
            _merged(rows, {name: scores[i] for name, scores in scored.items()})
            for i, rows in enumerate(batches)
        ]

    def metrics(self) -> dict[str, float]:
        """Counts of all teachers, added up."""
        total: Counter[str] = Counter()
        for teacher in self._teachers.values():
            total.update(teacher.metrics())
        return dict(total)

    def after_step(self, step: int) -> None:
        for teacher in self._teachers.values():
            teacher.after_step(step)

    def save(self, folder: Path) -> None:
        for i, teacher in enumerate(self._teachers.values()):
            teacher.save(_place(folder, i))

    def load(self, folder: Path) -> None:
        for i, teacher in enumerate(self._teachers.values()):
            teacher.load(_place(folder, i))


def _place(folder: Path, i: int) -> Path:
    """A folder for each: those that move write files of the same name."""
    place = folder / f"reference_{i}"
    place.mkdir(exist_ok=True)
    return place


def _of(name: str, rows: Rows) -> Rows:
    """The rows of one environment; where there are none, a row in which nothing counts."""
    own = [i for i, env in enumerate(rows.envs) if env == name]
    if own:
        return Rows(rows.token_ids[own], rows.mask[own], (name,) * len(own))
    return Rows(rows.token_ids[:1, :2], torch.zeros_like(rows.mask[:1, :2]), ("",))


def _merged(rows: Rows, by_env: Mapping[str, Scores]) -> Scores:
    """The tokens of all environments in the order of the rows."""
    envs = [rows.envs[i] for i in rows.mask.nonzero()[:, 0].tolist()]  # [N]
    if unknown := set(envs) - set(by_env):
        raise RunFailed(
            f"reference.teachers has no teacher for the environment {min(unknown)!r}: name one, "
            f"reference.teachers.{min(unknown)}=..."
        )
    numbers = torch.tensor([list(by_env).index(env) for env in envs], dtype=torch.int64)
    # [N] where each of the teachers' tokens belongs, one teacher after the other
    order = numbers.argsort(stable=True).to(rows.mask.device)

    def merge(tensors: Sequence[Tensor | None]) -> Tensor | None:
        known = [tensor for tensor in tensors if tensor is not None]
        if not known:
            return None
        given = torch.cat(known)
        result = torch.empty_like(given)
        result[order] = given
        return result

    logprobs = merge([scores.logprobs for scores in by_env.values()])
    assert logprobs is not None
    return Scores(
        logprobs,
        merge([scores.candidates for scores in by_env.values()]),
        merge([scores.candidate_logprobs for scores in by_env.values()]),
    )
