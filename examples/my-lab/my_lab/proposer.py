"""The policy proposes sums as exercises, and keeps those that it solves half of the time.

    propose -> "7+12"      "7+12" -> "19", "20"            one of two attempts is right: keep it
                                                              |
    exercises: 1+1, 2+3, ..., 7+12, ...  <-- next version ----'     played like any other example

In an episode that proposes, the role `proposer` is rewarded for a sum that is solved in one of two
attempts, and `solver` for its right answers. The kept sums join the pool of exercises when the next
version begins. Checkpoints contain them. Absolute Zero, arXiv:2505.03335; R-Zero, 2508.05004.
"""

import re
from collections.abc import Iterator
from random import Random
from typing import Any

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, user
from envs.protocol import Environment, Pool, Speak

ATTEMPTS = 2


class Proposer(Environment):
    """Proposes and solves sums of two numbers up to `max_operand`."""

    name = "proposer"
    holds_conversation = True
    reward_weights = {"reward": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, *, max_operand: int, num_seeds: int, num_eval: int) -> None:
        self._largest = max_operand
        operands = range(max_operand + 1)
        sums = [f"{left}+{right}" for left in operands for right in operands]
        self._held_out = Random("proposer/eval").sample(sums, num_eval)
        self._exercises: list[Example] = []
        self._kept: set[str] = set()
        self._known: set[str] = set()
        rng = Random("proposer/seeds")
        self._seeds = [self._sum(rng, 4) for _ in range(num_seeds)]

    def _sum(self, rng: Random, largest: int) -> str:
        return f"{rng.randint(0, largest)}+{rng.randint(0, largest)}"

    def _add(self, sums: list[str]) -> None:
        for text in sums:
            if text not in {*self._known, *self._held_out}:
                self._known.add(text)
                self._exercises.append(self._exercise(len(self._exercises), text))

    def _exercise(self, number: int, text: str) -> Example:
        left, right = map(int, text.split("+"))
        return Example(number, self.name, [user(text)], {"answer": str(left + right)})

    def examples(self, split: Split) -> list[Example]:
        if split == "train":
            self._add(self._seeds)  # not in __init__, because a mixture sets `name` later
            return self._exercises
        return [self._exercise(i, text) for i, text in enumerate(self._held_out)]

    def pools(self, split: Split) -> list[Pool]:
        """Return the exercises and, for training, a pool of equal weight that proposes new ones."""
        exercises = Pool(1.0, self.examples(split))
        if split == "eval":
            return [exercises]
        return [exercises, Pool(1.0, [Example(0, self.name, [user("propose")])])]

    async def play(self, episode: Episode, speak: Speak) -> None:
        if "answer" in episode.example.info:
            await speak(episode.example.messages, None, role="solver")
            return
        spoken = await speak(episode.example.messages, None, role="proposer")
        text = spoken.message.get("content") or ""
        numbers = re.fullmatch(r"(\d+)\+(\d+)", text, re.ASCII)
        valid = numbers and all(len(n) < 5 and int(n) <= self._largest for n in numbers.groups())
        right: list[float] = []
        # Do not let the solver answer a held-out sum, because the policy would train on it.
        for _ in range(ATTEMPTS if valid and text not in self._held_out else 0):
            spoken = await speak([user(text)], None, role="solver")
            right.append(
                float(spoken.message.get("content") == self._exercise(0, text).info["answer"])
            )
        episode.memory["right"] = right
        if 0 < sum(right) < ATTEMPTS:
            self._kept.add(text)

    async def score(self, episode: Episode) -> dict[str, Any]:
        """Return the reward of the role. The solver has one reward per attempt."""
        if "answer" in episode.example.info:
            return {"reward": float(episode.text == episode.example.info["answer"])}
        right = episode.memory["right"]
        if episode.role == "solver":
            return {"reward": right}
        return {"reward": float(0 < sum(right) < ATTEMPTS)}

    def begin_version(self, version: int) -> None:  # noqa: ARG002
        """Add the sums that were kept under the last version to the exercises, in a fixed order."""
        self._add(sorted(self._kept))
        self._kept.clear()

    def state(self) -> dict[str, Any]:
        return {
            "known": [e.messages[0]["content"] for e in self._exercises],
            "kept": sorted(self._kept),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._add(state.get("known", []))
        self._kept |= set(state.get("kept", []))

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        while True:
            text = self._sum(rng, self._largest)
            if text in self._held_out:
                continue
            if rng.random() < 0.25:
                yield [user("propose"), assistant(text)]
            else:
                yield [user(text), assistant(self._exercise(0, text).info["answer"])]
