"""Read held-out scores by question from evaluations/version_*.jsonl."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

import msgspec

from envs.messages import opening_of
from rl.runtime.folder import RunFolder, step_of
from rl.runtime.text import printable


@dataclass(frozen=True, order=True)
class Question:
    """One held-out example. Equal questions have equal environments, ids and opening messages."""

    env: str
    example: str
    digest: str  # hash of the messages before the first answer, without system messages


@dataclass(frozen=True)
class Evaluation:
    """The rewards of one policy version by question. An unscored rollout has the reward None."""

    rewards: dict[Question, list[float | None]]
    num_broken: int = 0  # number of unreadable lines

    @cached_property
    def scores(self) -> dict[Question, float]:
        return self.scores_with({})

    def scores_with(self, unscored: Mapping[str, float]) -> dict[Question, float]:
        """Return the mean reward of each question, NaN if all of its rollouts are left out.

        An unscored rollout gets the reward `unscored[env]`. Without this key, it is left out.
        """
        scores = {}
        for question, rewards in self.rewards.items():
            filled = [unscored.get(question.env) if x is None else x for x in rewards]
            known = [reward for reward in filled if reward is not None]
            scores[question] = sum(known) / len(known) if known else nan
        return scores


class _RolloutLine(msgspec.Struct):
    env: Any = ""
    example: Any = ""
    reward: float | None = None
    messages: msgspec.Raw = msgspec.Raw(b"[]")


_LINE = msgspec.json.Decoder(_RolloutLine)


def evaluated_versions(folder: RunFolder) -> list[int]:
    """Return the evaluated policy versions, oldest first."""
    return sorted(map(step_of, folder.evaluations.glob("version_[0-9]*.jsonl")))


def read_evaluation(folder: RunFolder, version: int) -> Evaluation:
    """Return the evaluation of one policy version. Count and skip unreadable lines."""
    rewards: dict[tuple[str, str], list[float | None]] = defaultdict(list)  # key: (env, example)
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
        # Prefer the messages of a scored rollout, because one that failed early may lack prompts.
        if all(reward is None for reward in rewards[key]):
            asked[key] = rollout.messages
        rewards[key].append(rollout.reward)
    by_question = {Question(*key, _digest(text)): rewards[key] for key, text in asked.items()}
    return Evaluation(by_question, num_broken)


def _digest(content: msgspec.Raw) -> str:
    """Return a hash of the messages before the first answer. They are equal for all policies."""
    messages = msgspec.json.decode(content)
    texts = opening_of(messages if isinstance(messages, list) else [])
    return hashlib.sha256("\n".join(texts).encode(errors="replace")).hexdigest()[:12]
