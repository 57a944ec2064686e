"""Questions out of data sets: a file of your own, or one of the Hugging Face hub.

A row has a question and an answer. An answer as in GSM8K, worked steps and then `#### 18`, is taken
apart into solution and answer; any other is the answer. Training questions that also occur in the
eval split are left out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from envs.protocol import Split
from envs.questions import Question, Questions

NEEDED = "install it with `pip install offbyone[data]`"


class _Rows(Questions):
    """Base of sources whose rows have a question and an answer under some key."""

    def __init__(self, *, question_key: str, answer_key: str) -> None:
        self._question_key, self._answer_key = question_key, answer_key

    def load(self, split: Split) -> Sequence[Question]:
        """The questions in the order of the file."""
        return self._splits[split]

    @cached_property
    def _splits(self) -> dict[Split, list[Question]]:
        raise NotImplementedError

    def _apart(self, train: list[Question], held_out: list[Question]) -> dict[Split, Any]:
        texts = {question.text for question in held_out}
        kept = [question for question in train if question.text not in texts]
        if not kept or not held_out:
            raise ValueError(
                f"{len(kept)} questions to train on and {len(held_out)} to evaluate with: "
                "both splits need some"
            )
        return {"train": kept, "eval": held_out}

    def _question(self, row: Mapping[str, Any], where: str) -> Question:
        for key in (self._question_key, self._answer_key):
            if key not in row:
                raise ValueError(
                    f"{where} has no {key!r} but {', '.join(map(repr, row))}: "
                    "set question_key and answer_key"
                )
        text, told = str(row[self._question_key]).strip(), str(row[self._answer_key]).strip()
        solution, mark, answer = told.rpartition("####")
        if not mark:
            return Question(text, told)
        solution = re.sub(r"<<[^>]*>>", "", solution).strip()  # GSM8K's calculator notes
        return Question(text, answer.strip(), solution)


class FileQuestions(_Rows):
    """Questions of a .jsonl or .parquet file."""

    def __init__(
        self,
        *,
        path: str,
        eval_path: str | None,
        num_eval: int,
        question_key: str,
        answer_key: str,
    ) -> None:
        """`eval_path` null: num_eval questions of `path` are held out."""
        super().__init__(question_key=question_key, answer_key=answer_key)
        self._path, self._eval_path, self._num_eval = path, eval_path, num_eval

    @cached_property
    def _splits(self) -> dict[Split, list[Question]]:
        questions = self._read(Path(self._path))
        if self._eval_path:
            return self._apart(questions, self._read(Path(self._eval_path))[: self._num_eval])
        count = min(self._num_eval, len(questions))
        chosen = sorted(Random("questions/eval").sample(range(len(questions)), count))
        return self._apart(questions, [questions[i] for i in chosen])

    def _read(self, path: Path) -> list[Question]:
        if not path.is_file():
            raise ValueError(f"there is no file {path}: env.questions.path names the questions")
        if path.suffix == ".parquet":
            rows = _parquet(path)
        elif path.suffix == ".jsonl":
            rows = _json_lines(path)
        else:
            raise ValueError(f"{path} is of no kind that can be read: use .jsonl or .parquet")
        return [self._question(row, f"{path}, row {i}") for i, row in enumerate(rows, 1)]


class HubQuestions(_Rows):
    """Questions of a data set of the Hugging Face hub, or of a local one in its form."""

    def __init__(
        self,
        *,
        path: str,
        name: str | None,
        train_split: str,
        eval_split: str,
        question_key: str,
        answer_key: str,
    ) -> None:
        """`path` and `name` are those of `datasets.load_dataset`."""
        super().__init__(question_key=question_key, answer_key=answer_key)
        self._path, self._name = path, name
        self._train_split, self._eval_split = train_split, eval_split

    @cached_property
    def _splits(self) -> dict[Split, list[Question]]:
        return self._apart(self._download(self._train_split), self._download(self._eval_split))

    def _download(self, split: str) -> list[Question]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(
                f"the questions of {self._path} need the package datasets: {NEEDED}, or choose "
                "env=word-problems, which makes its own"
            ) from error
        try:
            rows = load_dataset(self._path, self._name, split=split)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the data set {self._path} ({split}) cannot be loaded: {error}; env=word-problems "
                "needs no download"
            ) from error
        where = f"{self._path} ({split})"
        return [self._question(row, f"{where}, row {i}") for i, row in enumerate(rows, 1)]


def _json_lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, row {number} is not JSON: {error}") from error
    return rows


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow: {NEEDED}") from error
    return read_table(path).to_pylist()
