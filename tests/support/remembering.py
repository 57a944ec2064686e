"""An environment and an advantage that remember earlier groups, for runs that are resumed."""

from typing import Any

from envs.episode import Episode, Example, Split
from envs.reverse_text import ReverseText
from losses.groups import ScoredGroup


class GrowingReversal(ReverseText):
    """Make a longer word of each answer, and add it to the pool when the next version begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pool, self._said = super().examples("train"), set[str]()

    def examples(self, split: Split) -> list[Example]:
        return self._pool if split == "train" else super().examples(split)

    async def score(self, episode: Episode) -> dict[str, float]:
        self._said.add(f"{episode.text.strip()}s")
        return await super().score(episode)

    def _add(self, words: list[str]) -> None:
        for word in words:
            prompt, info = f"reverse: {word}", {"answer": word[::-1]}
            messages = [{"role": "user", "content": prompt}]
            self._pool.append(Example(len(self._pool), self.name, messages, info))

    def begin_version(self, version: int) -> None:
        self._add(sorted(self._said))
        self._said.clear()

    def state(self) -> dict[str, Any]:
        words = [example.info["answer"][::-1] for example in self._pool]
        return {"added": words[self.num_train :], "said": sorted(self._said)}

    def load(self, state: dict[str, Any]) -> None:
        self._add(state.get("added", []))
        self._said |= set(state.get("said", []))


class AboveEarlier:
    """Subtract the mean of all earlier rewards of the environment from each reward."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # environment -> [sum, number] of its rewards

    def __call__(self, group: ScoredGroup) -> list[float]:
        total, count = self._sums.get(group.example.env, [0.0, 0])
        rewards = [reward or 0.0 for reward in group.rewards]
        self._sums[group.example.env] = [total + sum(rewards), count + len(rewards)]
        return [reward - total / max(count, 1) for reward in rewards]

    def state(self) -> dict[str, Any]:
        return self._sums

    def load(self, state: dict[str, Any]) -> None:
        self._sums = dict(state)
