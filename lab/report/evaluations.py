"""Read held-out scores by question from evaluations/version_*.jsonl."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from math import nan
from typing import Any

import msgspec

from rl.runtime.folder import RunFolder, step_of
from rl.runtime.text import printable


@dataclass(frozen=True, order=True)
class Question:
    """One held-out example. Questions of two runs are equal if their user messages are equal."""

    env: str
    example: str
    digest: str  # hash of all user messages before the first answer


@dataclass(frozen=True)
class Evaluation:
    """The scores of one policy version by question."""

    scores: dict[Question, float]  # mean reward, NaN if no rollout of the question was scored
    num_broken: int = 0  # number of unreadable lines


class _Line(msgspec.Struct):
    env: Any = ""
    example: Any = ""
    reward: float | None = None
    messages: msgspec.Raw = msgspec.Raw(b"[]")


_LINE = msgspec.json.Decoder(_Line)


def evaluated_versions(folder: RunFolder) -> list[int]:
    """Return the evaluated policy versions, oldest first."""
    return sorted(map(step_of, folder.evaluations.glob("version_[0-9]*.jsonl")))


def read_evaluation(folder: RunFolder, version: int) -> Evaluation:
    """Return the evaluation of one policy version. Count and skip unreadable lines."""
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)  # key: (env, example id)
    asked: dict[tuple[str, str], msgspec.Raw] = {}
    num_broken = 0
    try:
        lines = folder.read(folder.evaluation_of(version)).splitlines()
    except OSError:
        return Evaluation({}, num_broken=1)
    for line in lines:
        try:
            line.decode()  # raises for invalid UTF-8, which msgspec does not check in a Raw field
            rollout = _LINE.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            num_broken += 1
            continue
        key = (printable(str(rollout.env)), printable(str(rollout.example)))
        asked.setdefault(key, rollout.messages)
        rewards[key] += [] if rollout.reward is None else [rollout.reward]
    scores = {
        _question(*key, messages): sum(rewards[key]) / len(rewards[key]) if rewards[key] else nan
        for key, messages in asked.items()
    }
    return Evaluation(scores, num_broken)


def _question(env: str, example: str, messages: msgspec.Raw) -> Question:
    text = _user_text(msgspec.json.decode(messages))
    return Question(env, example, hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12])


def _user_text(messages: Any) -> str:
    """Return the user messages before the first answer. System prompts may differ between arms."""
    texts = []
    for message in messages if isinstance(messages, list) else []:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            break
        if role == "user":
            content = message.get("content")
            texts.append(content if isinstance(content, str) else str(content))
    return "\n".join(texts)
