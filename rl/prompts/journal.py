"""What was answered, a line each: a search that was stopped asks none of it again.

    rollouts.jsonl       (prompt, split, environment, example) -> the rollout
    reflections.jsonl    (what the teacher was shown)          -> what it said

GEPA's own state is not saved. It decides by its seed and by the answers that it gets: begun anew
and answered out of the journal, it soon stands where it stood, down to the last rollout. The n-th
time that a question is asked it gets its n-th answer. One that is not there is asked in earnest, so
a search that takes another way (by another version of GEPA) loses time and is never told wrong.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.run.json_lines import json_line
from rl.run.whole_files import write_whole

Record = dict[str, Any]


class Journal:
    """One file of answers. Each is on disk before anybody hears it."""

    def __init__(
        self, path: Path, key: tuple[str, ...], failed: Callable[[Record], bool] = lambda _: False
    ) -> None:
        """Read what is there.

        Args:
            path: the file; need not exist.
            key: the fields of a record that are the question.
            failed: whether a record is a failure; those at the end are tried again.

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
        """Return the next answer to a question; None where it has to be asked."""
        answers = self._answers[self._question(question)]
        return answers.popleft() if answers else None

    def add(self, record: Record) -> Record:
        """Write an answer, and return it as it will be read again."""
        line = json_line(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
        return json.loads(line)

    def _question(self, record: Record) -> tuple[Any, ...]:
        return tuple(record[name] for name in self._key)


def _readable(path: Path) -> list[Record]:
    """The whole lines; of one that a kill cut short, its question is asked again."""
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
