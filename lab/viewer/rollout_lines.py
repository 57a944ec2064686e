"""Convert lines of rollout files to rows of the index.

lines of a file -> RolloutLine -> a row: numbers to filter by, text to search
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from envs.messages import opening_of, text_of

_LONGEST_TITLE = 300  # maximum characters of a question in the table
_EXACT_BITS = 53  # JavaScript rounds integers with more bits


@dataclass(frozen=True)
class SourceFile:
    """A rollout file with its size and modification time."""

    path: Path
    source: str  # "training" or "evaluation"
    step: int  # training step, or evaluated policy version
    modified: int
    size: int


class Row(NamedTuple):
    """One row of the index, with the data of one rollout."""

    path: Path
    source: str
    start: int  # byte offset of the line in the file
    size: int
    step: int
    group_id: int
    place: int  # index of the rollout in its group
    id: str
    example: str
    env: str
    reward: float | None
    advantage: float | None  # mean over turns if each turn has an advantage
    length: int
    turns: int
    staleness: int | None
    stop: str
    used: bool
    error: bool
    question: int
    title: str
    text: str


class RolloutLine(msgspec.Struct):
    """One line of a rollout file. Evaluations lack group, advantage, versions and used."""

    messages: list[Any]
    example: Any = None
    env: str = ""
    group: int | None = None
    id: str = ""
    reward: float | None = None
    advantage: float | list[float] | None = None
    tokens: int = 0
    turns: int = 0
    versions: list[int] = []
    stop_reason: str = ""
    used: bool = True
    error: str = ""


_DECODER = msgspec.json.Decoder(RolloutLine)
_SURROGATES = re.compile("[\ud800-\udfff]")


def rows_of(file: SourceFile) -> tuple[list[Row], list[str], bool]:
    """Return a file's rows, the errors of bad lines, and whether the last line is complete."""
    content = file.path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    rows: list[Row] = []
    name, broken = "/".join(file.path.parts[-2:]), list[str]()
    offset, places = 0, Counter[int]()  # `places` counts the rollouts of each group
    for number, line in enumerate(complete.splitlines(keepends=True), 1):
        try:
            rows.append(_row(_decoded(line), file, offset, len(line), places))
        except (ValueError, RecursionError) as error:
            if line.strip():
                broken.append(f"{name} line {number} is not a rollout: {error}")
        offset += len(line)
    return rows, broken, len(complete) == len(content)


def _decoded(line: bytes) -> RolloutLine:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return _DECODER.decode(without_surrogates(line))


def without_surrogates(line: bytes) -> bytes:
    """Return a line without lone surrogates, which Python writes into JSON and msgspec rejects."""
    if b"\\ud" not in line:
        return line
    text = json.dumps(json.loads(line), ensure_ascii=False)
    return _SURROGATES.sub("\ufffd", text).encode()


def _row(line: RolloutLine, file: SourceFile, start: int, size: int, places: Counter[int]) -> Row:
    texts = [text_of(message) for message in line.messages]
    opening = opening_of(line.messages)
    group = line.group
    if group is None:  # evaluations have no group number, so use a hash of the example
        group = _question(line.env, [str(line.example), *opening])
    place = places[group]
    places[group] += 1
    advantage = line.advantage
    if isinstance(advantage, list):
        advantage = sum(advantage) / len(advantage) if advantage else None
    return Row(
        path=file.path,
        source=file.source,
        start=start,
        size=size,
        step=file.step,
        group_id=group,
        place=place,
        id=line.id,
        example=str(line.example),
        env=line.env,
        reward=line.reward,
        advantage=advantage,
        length=line.tokens,
        turns=line.turns,
        staleness=file.step - min(line.versions) if line.versions else None,
        stop=line.stop_reason,
        used=line.used,
        error=bool(line.error),
        question=_question(line.env, opening),
        title=" ".join(" ".join(opening[-1:]).split())[:_LONGEST_TITLE],
        text="\n".join(texts).lower(),
    )


def _question(env: str, opening: list[str]) -> int:
    """Return a hash of the question, which is the same in every step and every run."""
    digest = xxhash.xxh3_64_intdigest("\0".join([env, *opening]).encode("utf-8", "replace"))
    return digest >> (64 - _EXACT_BITS)
