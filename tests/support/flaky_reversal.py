"""Define a reverse-text environment whose score fails for some words."""

from collections.abc import Mapping, Sequence

from envs.episode import Episode, Example, Split
from envs.reverse_text import ReverseText


class FlakyReversal(ReverseText):
    """Raise for words that begin with a letter of `broken`; splits in `empty` have no examples."""

    name = "flaky"

    def __init__(
        self,
        *,
        min_length: int,
        max_length: int,
        num_train: int,
        num_eval: int,
        reward_weights: Mapping[str, float],
        broken: str,
        empty: Sequence[str],
    ) -> None:
        super().__init__(
            min_length=min_length,
            max_length=max_length,
            num_train=num_train,
            num_eval=num_eval,
            reward_weights=reward_weights,
        )
        self._broken, self._empty = broken, empty

    def examples(self, split: Split) -> list[Example]:
        return [] if split in self._empty else super().examples(split)

    async def score(self, episode: Episode) -> dict[str, float]:
        word = episode.example.info["answer"][::-1]
        if word[0] in self._broken:
            raise RuntimeError("the scorer is down")
        return await super().score(episode)
