"""Lines of rollout files as rows of the index.

    bytes of complete lines -> RolloutLine -> a row: numbers to filter by, text to search, its place

A file that is being written ends in half a line; what has no end yet is left for the next call.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

_LONGEST_TITLE = 300  # characters of a question in the list
_EXACT_BITS = 53  # of an integer that a browser keeps
Row = tuple[Any, ...]


class RolloutLine(msgspec.Struct):
    """What the index reads of a line; evaluations lack group, advantage, versions and used."""

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
_HALVES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BrokenLine:
    """A line that is none of a rollout; the number counts from 1."""

    number: int
    why: str


def rows_of(
    content: bytes, *, offset: int, number: int, step: int, places: Counter[int]
) -> Iterator[Row | BrokenLine]:
    """Yield a row for each line of `content`, which ends where a line does.

    Args:
        content: complete lines.
        offset: bytes of the file before them.
        number: lines of the file before them.
        step: the step, or version, that the file is of.
        places: by group, how many rollouts of it were seen in this file; counted on.

    """
    for line in content.splitlines(keepends=True):
        number += 1
        try:
            yield _row(_decoded(line), offset, len(line), step, places)
        except ValueError as error:
            if line.strip():
                yield BrokenLine(number, str(error))
        offset += len(line)


def _decoded(line: bytes) -> RolloutLine:
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return _DECODER.decode(whole_characters(line))


def whole_characters(line: bytes) -> bytes:
    """Return a line without halves of characters, which Python's JSON has and no other reads."""
    if b"\\ud" not in line:
        return line
    text = json.dumps(json.loads(line), ensure_ascii=False)
    return _HALVES.sub("\ufffd", text).encode()


def _row(line: RolloutLine, offset: int, size: int, step: int, places: Counter[int]) -> Row:
    """In the order of the index's columns (rl/viewer/index.py)."""
    texts = [message_text(message) for message in line.messages]
    opening = _opening(line.messages, texts)
    question = _question(line.env, opening)
    # Of an evaluation, which names examples alone: two of them may ask the same.
    group = line.group
    if group is None:
        group = _question(line.env, [str(line.example), *opening])
    place = places[group]
    places[group] += 1
    advantage = line.advantage
    if isinstance(advantage, list):
        advantage = sum(advantage) / len(advantage) if advantage else None
    staleness = step - min(line.versions) if line.versions else None
    return (
        offset,
        size,
        step,
        group,
        place,
        line.id,
        str(line.example),
        line.env,
        line.reward,
        advantage,
        line.tokens,
        line.turns,
        staleness,
        line.stop_reason,
        line.used,
        bool(line.error),
        question,
        _title(opening),
        "\n".join(texts).lower(),
    )


def _opening(messages: list[Any], texts: list[str]) -> list[str]:
    """What was asked: all that stands before the first answer, but for system messages."""
    opening = []
    for message, text in zip(messages, texts, strict=True):
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            break
        if role != "system":  # another prompt leaves the question the same
            opening.append(text)
    return opening


def _question(env: str, opening: list[str]) -> int:
    """The same number for the same question, in any step and any run."""
    digest = xxhash.xxh3_64_intdigest("\0".join([env, *opening]).encode("utf-8", "replace"))
    return digest >> (64 - _EXACT_BITS)


def _title(opening: list[str]) -> str:
    text = " ".join(opening[-1].split()) if opening else ""
    return text if len(text) <= _LONGEST_TITLE else text[: _LONGEST_TITLE - 1] + "…"


def message_text(message: Any) -> str:
    """Return all that a message says, whatever its shape."""
    if not isinstance(message, dict):
        return _text(message)
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):  # nearly all: spare them the rest
        return content
    parts = [message.get("reasoning_content"), content]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else call
        if isinstance(function, dict):
            parts += [function.get("name"), function.get("arguments")]
        else:
            parts.append(function)
    return "\n".join(_text(part) for part in parts if part)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
