"""Define a reverse-text environment whose score fails for some words."""

from collections.abc import Sequence
from dataclasses import dataclass

from envs.episode import Episode, Example, Split
from envs.reverse_text import ReverseText


@dataclass(kw_only=True, eq=False)
class FlakyReversal(ReverseText):
    """Raise for words that begin with a letter of `broken`; splits in `empty` have no examples."""

    name = "flaky"

    broken: str
    empty: Sequence[str]

    def examples(self, split: Split) -> list[Example]:
        return [] if split in self.empty else super().examples(split)

    async def score(self, episode: Episode) -> dict[str, float]:
        word = episode.example.info["answer"][::-1]
        if word[0] in self.broken:
            raise RuntimeError("the scorer is down")
        return await super().score(episode)


class Compared(ReverseText):
    """Compare the rollouts of a group."""

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        return [{} for _ in episodes]
