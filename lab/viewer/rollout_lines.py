"""Convert lines of rollout files to rows of RunIndex (index.py)."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from msgspec import structs

from envs.messages import opening_of, replace_surrogates, text_of

_LONGEST_TITLE = 300  # maximum length of a question in the table, in characters
_EXACT_BITS = 53  # JavaScript rounds integers with more bits


@dataclass(frozen=True)
class SourceFile:
    path: Path
    source: str  # "training" or "evaluation"
    step: int  # training step, or evaluated policy version; -1 for evaluate.py
    modified: int  # modification time in nanoseconds
    size: int  # in bytes


class RolloutLine(msgspec.Struct, kw_only=True):
    """One line of a rollout file. Evaluations lack group, id, advantage, versions and used."""

    messages: list[Any]
    example: Any = None
    env: str = ""
    group: int | None = None
    id: str = ""
    reward: float | None = None
    advantage: float | list[float] | None = None
    length: int = msgspec.field(default=0, name="tokens")
    turns: int = 0
    versions: list[int] = []
    stop: str = msgspec.field(default="", name="stop_reason")
    used: bool = True
    error: Any = ""


class Row(RolloutLine):
    """A rollout in RunIndex: its line without `messages` and `versions`, and where the line is.

    `advantage` is the mean over turns. `error` is True if the rollout has an error.
    """

    path: Path
    source: str
    start: int  # byte offset of the line in the file
    size: int  # number of bytes of the line
    step: int
    group_id: int
    place: int  # index of the rollout in its group
    staleness: int | None
    question: int
    title: str
    text: str
    new: bool  # whether the policy sampled the rollout for this step


_DECODER = msgspec.json.Decoder(RolloutLine)


def rows_of(file: SourceFile) -> tuple[list[Row], list[str], bool]:
    """Return a file's rows, the errors of bad lines, and whether the last line is complete."""
    content = file.path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    rows: list[Row] = []
    name, broken = "/".join(file.path.parts[-2:]), list[str]()
    offset, counts = 0, Counter[int]()  # number of rollouts of each group so far
    for number, line in enumerate(complete.splitlines(keepends=True), 1):
        try:
            decoded = _DECODER.decode(without_surrogates(line))
            rows.append(_row(decoded, file, offset, len(line), counts))
        except (ValueError, RecursionError) as error:
            if line.strip():
                broken.append(f"{name} line {number} is not a rollout: {error}")
        offset += len(line)
    return rows, broken, len(complete) == len(content)


def without_surrogates(line: bytes) -> bytes:
    """Return a line without lone surrogates, which Python writes into JSON and msgspec rejects."""
    if b"\\ud" not in line:
        return line
    return replace_surrogates(json.dumps(json.loads(line), ensure_ascii=False)).encode()


def _row(line: RolloutLine, file: SourceFile, start: int, size: int, counts: Counter[int]) -> Row:
    texts = [text_of(message) for message in line.messages]
    opening = opening_of(line.messages)
    group = line.group
    if group is None:  # evaluations have no group number, so group by example
        group = _hash_of(line.env, [str(line.example), *opening])
    place = counts[group]
    counts[group] += 1
    advantage = line.advantage
    if isinstance(advantage, list):
        advantage = sum(advantage) / len(advantage) if advantage else None
    fields = {**structs.asdict(line), "messages": [], "versions": [], "advantage": advantage}
    return Row(
        **{**fields, "error": bool(line.error)},
        path=file.path,
        source=file.source,
        start=start,
        size=size,
        step=file.step,
        group_id=group,
        place=place,
        staleness=file.step - min(line.versions) if line.versions else None,
        question=_hash_of(line.env, opening),
        title=" ".join(" ".join(opening[-1:]).split())[:_LONGEST_TITLE],
        text="\n".join(texts).lower(),
        new="@" not in line.id and not line.id.startswith("-"),
    )


def _hash_of(env: str, opening: list[str]) -> int:
    """Return a hash that identifies `env` and the opening messages in all steps and runs."""
    digest = xxhash.xxh3_64_intdigest("\0".join([env, *opening]).encode("utf-8", "replace"))
    return digest >> (64 - _EXACT_BITS)
