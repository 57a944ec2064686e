"""Held-out scores by question: what evaluations/version_*.jsonl says of one policy."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import msgspec

from rl.run.folder import RunFolder, step_of

_LONGEST_TEXT = 160  # characters of a question that are kept to be shown


@dataclass(frozen=True, order=True)
class Question:
    """One example of the held-out split; equal in two runs only if the same was asked."""

    env: str
    example: str
    digest: str  # of all that was asked
    text: str  # of its beginning


@dataclass(frozen=True)
class Evaluation:
    """One policy version on its questions."""

    version: int
    scores: dict[Question, float]  # mean reward; NaN where no rollout could be scored
    num_rollouts: int
    num_broken: int  # lines that are none
    digest: str  # of the file


class _Line(msgspec.Struct):
    env: Any = ""
    example: Any = ""
    reward: float | None = None
    messages: msgspec.Raw = msgspec.Raw(b"[]")


_LINE = msgspec.json.Decoder(_Line)


def evaluated_versions(folder: RunFolder) -> list[int]:
    """The versions that were evaluated, oldest first."""
    return sorted(map(step_of, folder.evaluations.glob("version_[0-9]*.jsonl")))


def read_evaluation(folder: RunFolder, version: int) -> Evaluation:
    """The evaluation of one version; a broken line is counted and left out."""
    return parse_evaluation(version, folder.evaluation_of(version))


def parse_evaluation(version: int, path: Path) -> Evaluation:
    """The evaluation that is in a file."""
    content = path.read_bytes()
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    asked: dict[tuple[str, str], msgspec.Raw] = {}
    num_rollouts = num_broken = 0
    for line in content.splitlines():
        try:
            line.decode()  # msgspec looks into no text that it only keeps
            rollout = _LINE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            num_broken += 1
            continue
        key = (str(rollout.env), str(rollout.example))
        asked.setdefault(key, rollout.messages)
        num_rollouts += 1
        if rollout.reward is not None:
            rewards[key].append(rollout.reward)
    scores = {
        _question(*key, messages): _mean(rewards.get(key, ())) for key, messages in asked.items()
    }
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Evaluation(version, scores, num_rollouts, num_broken, digest)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan


def _question(env: str, example: str, messages: msgspec.Raw) -> Question:
    text = _asked(msgspec.json.decode(messages))
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
    shown = " ".join(text.split())
    if len(shown) > _LONGEST_TEXT:
        shown = shown[: _LONGEST_TEXT - 3] + "..."
    return Question(env, example, digest, shown)


def _asked(messages: Any) -> str:
    """What the user said before the policy did. A system prompt belongs to the arm instead."""
    parts = []
    for message in messages if isinstance(messages, list) else []:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            break
        if role == "user":
            content = message.get("content")
            parts.append(content if isinstance(content, str) else str(content))
    return "\n".join(parts)
