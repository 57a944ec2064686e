"""The answers of a search, one per line, so that a resumed search does not ask again.

    rollouts.jsonl       (prompt, split, environment, example) -> the rollout
    reflections.jsonl    (the question to the teacher)         -> the teacher's answer

GEPA's own state is not saved, because GEPA's decisions depend only on its seed and on the answers.
A resumed search starts from the beginning and reads its answers from the journal until it reaches
its last state. The n-th time that a question is asked it gets its n-th answer. If the journal has
none, the question is asked again, so another version of GEPA costs time but no wrong answers.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.runtime.files import json_line, write_whole

Record = dict[str, Any]


class Journal:
    """One file of answers. Each answer is written before it is used."""

    def __init__(
        self, path: Path, key: tuple[str, ...], failed: Callable[[Record], bool] = lambda _: False
    ) -> None:
        """Read the file.

        Args:
            path: the file; it may be missing.
            key: the fields of a record that are the question.
            failed: whether a record is a failure; failures at the end are tried again.

        """
        self._path, self._key = path, key
        records = _readable(path)
        while records and failed(records[-1]):
            records.pop()
        if path.is_file():
            write_whole(path, "".join(map(json_line, records)))
        self._answers: defaultdict[tuple[Any, ...], deque[Record]] = defaultdict(deque)
        for record in records:
            self._answers[self._question(record)].append(record)
        self.num_kept = len(records)

    def take(self, question: Record) -> Record | None:
        """Return the next answer to a question; None if it must be asked."""
        answers = self._answers[self._question(question)]
        return answers.popleft() if answers else None

    def add(self, record: Record) -> Record:
        """Write an answer, and return it as a later search will read it."""
        line = json_line(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
        return json.loads(line)

    def _question(self, record: Record) -> tuple[Any, ...]:
        return tuple(record[name] for name in self._key)


def _readable(path: Path) -> list[Record]:
    """Return the complete lines; the question of an incomplete one is asked again."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
