"""Define a task that the policy solves only with the right system prompt."""

from collections.abc import Iterator
from random import Random

from envs.episode import Example, Split
from envs.messages import Message, assistant, user
from envs.reverse_text import ReverseText

FORWARDS, BACKWARDS = "forwards", "backwards"


class WordEitherWay(ReverseText):
    """Reward the word backwards; the default system prompt says "forwards"."""

    name = "word-either-way"

    def examples(self, split: Split) -> list[Example]:
        return [
            Example(example.id, self.name, _prompt(FORWARDS, word[::-1]), example.info)
            for example in super().examples(split)
            for word in [str(example.info["answer"])]
        ]

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield words forwards and backwards, each after the matching system prompt."""
        for _, answer in super().demonstrations(rng):
            backwards = str(answer["content"])
            word = backwards[::-1]
            if rng.random() < 0.5:
                yield [*_prompt(BACKWARDS, word), assistant(backwards)]
            else:
                yield [*_prompt(FORWARDS, word), assistant(word)]


def _prompt(way: str, word: str) -> list[Message]:
    return [{"role": "system", "content": way}, user(word)]
