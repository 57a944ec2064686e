"""The default environment: in one turn, the policy writes a word backwards.

    reverse: cat   ->   tac

The examples are distinct random words of a-z, drawn with fixed seeds. The run's seed changes only
their order. Eval words depend only on the lengths and on num_eval, and never occur in training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, user
from envs.options import PositiveInt, check_range
from envs.protocol import Environment, check_weights
from envs.rewards import final_text

BASE = len(ascii_lowercase)
_MAX_NUMBERED_LENGTH = 13  # for longer words range(26**length) is too long for Python's len()


@dataclass(kw_only=True, eq=False)
class ReverseText(Environment):
    """The environment reverse-text. Word lengths are equally common if enough short words exist."""

    name = "reverse-text"
    REWARDS: ClassVar[Sequence[str]] = ("exact", "similarity")  # names that `score` returns

    min_length: int
    max_length: int
    num_train: PositiveInt
    num_eval: PositiveInt
    reward_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        check_range(min_length=self.min_length, max_length=self.max_length)
        self._lengths = range(self.min_length, self.max_length + 1)
        capacity, needed = sum(BASE**n for n in self._lengths), self.num_train + self.num_eval
        if needed > capacity:
            raise ValueError(
                f"only {capacity} words have {self.min_length} to {self.max_length} letters, but "
                f"num_train + num_eval = {needed}: raise max_length, or lower num_train or num_eval"
            )
        check_weights(self.reward_weights, self.REWARDS)

    def examples(self, split: Split) -> list[Example]:
        words = self._eval_words if split == "eval" else self._train_words
        return [
            Example(id=i, env=self.name, messages=[_prompt(word)], info={"answer": word[::-1]})
            for i, word in enumerate(words)
        ]

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return `exact` (0 or 1) and `similarity`, the share of letters in the right position."""
        completion = final_text(episode)
        answer = episode.example.info["answer"]
        hits = sum(a == b for a, b in zip(completion, answer, strict=False))
        return {
            "exact": float(completion == answer),
            "similarity": hits / max(len(completion), len(answer)),
        }

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        held_out = set(self._eval_words)
        while True:
            word = _random_word(rng, rng.choice(self._lengths))
            if word not in held_out:
                yield [_prompt(word), assistant(word[::-1])]

    @cached_property
    def _eval_words(self) -> list[str]:
        return self._draw_words(Random("reverse-text/eval"), self.num_eval)

    @cached_property
    def _train_words(self) -> list[str]:
        held_out = set(self._eval_words)
        drawn = self._draw_words(Random("reverse-text/train"), self.num_train + self.num_eval)
        return [word for word in drawn if word not in held_out][: self.num_train]

    def _draw_words(self, rng: Random, count: int) -> list[str]:
        """Return `count` distinct words. If there are too few short words, draw more long words."""
        words: list[str] = []
        for i, length in enumerate(self._lengths):
            share = -(-(count - len(words)) // (len(self._lengths) - i))  # number of words to draw
            if length > _MAX_NUMBERED_LENGTH:
                drawn: set[str] = set()
                while len(drawn) < share:
                    drawn.add(_random_word(rng, length))
                words += sorted(drawn)
                continue
            numbers = rng.sample(range(BASE**length), min(share, BASE**length))
            words += [_word_of_number(number, length) for number in numbers]
        rng.shuffle(words)
        return words


def _prompt(word: str) -> Message:
    return user(f"reverse: {word}")


def _random_word(rng: Random, length: int) -> str:
    if length > _MAX_NUMBERED_LENGTH:
        return "".join(rng.choices(ascii_lowercase, k=length))
    return _word_of_number(rng.randrange(BASE**length), length)


def _word_of_number(number: int, length: int) -> str:
    """Return `number` in base 26 as a word of `length` letters (a = 0, lowest digit first)."""
    letters = []
    for _ in range(length):
        number, digit = divmod(number, BASE)
        letters.append(ascii_lowercase[digit])
    return "".join(letters)
