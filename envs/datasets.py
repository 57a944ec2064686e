"""Examples from local files or the Hugging Face hub. Columns become a prompt and an answer.

    {"question": "2+2?", "answer": "4", "level": 1}
        -> messages: [user: 2+2?], info: {"answer": "4", "level": 1}

A prompt is text or a list of messages. Eval examples are the rows of `num_eval` prompts of the eval
split, or of the train split if there is no eval split. `Dataset` chooses these prompts by their
hashes, so the order of the rows does not matter. Prompts of the eval split are not trained on.
envs/composed.py accepts any class that has a method `examples`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from envs.episode import Example, Split
from envs.loading import LazyExamples, load_rows, read_json_lines, require_reachable
from envs.messages import check_messages, user
from envs.options import NonNegativeInt

_CHECKED_BYTES = 100_000_000  # files with more bytes in total are not checked before a run

Rows = Any  # a list of mappings or a datasets.Dataset; both support len(rows) and rows[i]
EVAL, TRAIN = "eval", "train"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Base class of all data sets. conf/env/composed.yaml explains the options."""

    path: str  # a file, a file pattern, or the data set's name on the hub
    prompt: str
    answer: str | None
    num_eval: NonNegativeInt

    def load(self) -> dict[str, Rows]:
        """Return split -> rows: "train", and "eval" if the data set has an eval split."""
        raise NotImplementedError

    def check(self) -> None:
        """Check quickly, before the run, that rows can be read. Raise ValueError if not."""

    def examples(self, split: Split, *, env: str) -> Sequence[Example]:
        """Return the split's examples for the environment named `env`, in the order of the rows.

        Raise ValueError if the rows cannot be loaded or lack a column.
        """
        rows, numbers = self._rows_by_split[split]
        if split == TRAIN and not numbers:
            raise ValueError(
                f"{self.path} leaves no rows for training, because all {len(rows)} have prompts "
                "that are held out: add rows with other prompts, choose another eval split, or "
                "lower num_eval if there is no eval split"
            )
        return _Examples(self, rows, numbers, env)

    @cached_property
    def _rows_by_split(self) -> dict[str, tuple[Rows, Sequence[int]]]:
        loaded = self.load()
        self._check_rows(loaded)
        train, eval_rows = loaded[TRAIN], loaded.get(EVAL, loaded[TRAIN])
        keys = self._prompt_hashes(train)
        eval_keys = self._prompt_hashes(eval_rows) if EVAL in loaded else keys
        chosen = set(sorted(set(eval_keys))[: self.num_eval])
        held_out = {*eval_keys} if EVAL in loaded else chosen
        train_numbers = [i for i, key in enumerate(keys) if key not in held_out]
        eval_numbers = [i for i, key in enumerate(eval_keys) if key in chosen]
        return {TRAIN: (train, train_numbers), EVAL: (eval_rows, eval_numbers)}

    def _prompt_hashes(self, rows: Rows) -> list[bytes]:
        prompts = _column(rows, self.prompt)
        texts = (json.dumps(one, sort_keys=True, default=str).encode() for one in prompts)
        return [hashlib.sha256(text).digest() for text in texts]

    def _check_rows(self, loaded: Mapping[str, Rows]) -> None:
        for split, rows in loaded.items():
            path = getattr(self, "eval_path", self.path) if split == EVAL else self.path
            if not len(rows):
                raise ValueError(f"{path} has no rows: add rows or choose another path")
            for key, column in (("prompt", self.prompt), ("answer", self.answer)):
                for number, value in enumerate(_column(rows, column) if column else ()):
                    if value is None:
                        instead = " or null" if key == "answer" else ""
                        raise ValueError(
                            f"{path}: row {number + 1} has no value in the column {column!r} (it "
                            f"has {', '.join(map(repr, rows[number])) or 'none'}): add it, remove "
                            f"the row, or set dataset.{key} to an existing column{instead}"
                        )
                    if key == "prompt" and isinstance(value, list):
                        check_messages(value, f"{path}, row {number + 1}")

    def example(self, row: Mapping[str, Any], number: int, env: str) -> Example:
        """Return the example of a row. `info` has the answer, and all columns except the prompt."""
        prompt = row[self.prompt]
        messages = list(prompt) if isinstance(prompt, list) else [user(str(prompt))]
        info = {name: value for name, value in row.items() if name != self.prompt}
        if self.answer is not None:
            info["answer"] = row[self.answer]
        return Example(id=number, env=env, messages=messages, info=info)


def _column(rows: Rows, name: str) -> list[Any]:
    """Return the values of a column. A value is None if it is null or if the column is missing."""
    if isinstance(rows, list):
        return [row.get(name) for row in rows]
    return rows[name][:] if name in rows.column_names else [None]


@dataclass(frozen=True)
class _Examples(LazyExamples):
    """A sequence that builds each example on access, because all examples may exceed memory."""

    dataset: Dataset
    rows: Rows
    numbers: Sequence[int]  # for each example, the index of its row in `rows`
    env: str

    def __len__(self) -> int:
        return len(self.numbers)

    def example_at(self, index: int) -> Example:
        return self.dataset.example(self.rows[self.numbers[index]], index, self.env)


@dataclass(frozen=True, kw_only=True)
class JsonLines(Dataset):
    """A data set in a file with one JSON object per line. A second file may contain eval rows."""

    local_files: ClassVar[tuple[str, ...]] = ("path", "eval_path")  # options whose files must exist

    eval_path: str | None

    def check(self) -> None:
        if sum(p.stat().st_size for p in self._paths.values() if p.is_file()) <= _CHECKED_BYTES:
            self._check_rows(self.load())

    def load(self) -> dict[str, Rows]:
        return {key: [row for _, row in read_json_lines(p)] for key, p in self._paths.items()}

    @property
    def _paths(self) -> dict[str, Path]:
        paths = {TRAIN: self.path, EVAL: self.eval_path}
        return {split: Path(path).expanduser() for split, path in paths.items() if path is not None}


@dataclass(frozen=True, kw_only=True)
class Files(JsonLines):
    """A data set in Parquet or CSV files. The paths may be file patterns."""

    format: Literal["parquet", "csv"]

    def check(self) -> None:
        """Check nothing, because `datasets` first converts the files, which may take minutes."""

    def load(self) -> dict[str, Rows]:
        files = {split: str(path) for split, path in self._paths.items()}
        return dict(load_rows(self.path, self.format, data_files=files))


@dataclass(frozen=True, kw_only=True)
class Hub(Dataset):
    """A data set of the Hugging Face hub, or a local copy of one, loaded with `datasets`."""

    config: str | None  # name of a configuration (subset) of the data set; None: its default
    split: str  # name of the training split, such as train or train[:90%]
    eval_split: str | None
    revision: str | None  # branch, tag or commit; None: the newest commit

    def check(self) -> None:
        require_reachable(self.path)

    def load(self) -> dict[str, Rows]:
        extra = {"name": self.config, "revision": self.revision}
        names = [(TRAIN, self.split), (EVAL, self.eval_split)]
        return {split: load_rows(self.path, self.path, split=s, **extra) for split, s in names if s}
