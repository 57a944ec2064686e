"""Questions with a mathematical answer, and where they come from.

A source says how many there are and keeps the eval split apart; an environment (environment.py,
math_python.py) asks them and grades. Sources: word_problems.py and calculations.py make them up,
dataset_questions.py reads them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from envs.episode import Split

MAX_TRIES = 20  # draws per new question before we say that there are too few


@dataclass(frozen=True)
class Question:
    """One question and how it can be answered."""

    text: str
    answer: str
    solution: str = ""  # steps in words, without the final answer; empty where unknown
    code: str = ""  # Python that ends in the answer; empty where unknown


class Questions:
    """Base of all sources. Constructors are cheap; `load` may read files."""

    def load(self, split: Split) -> Sequence[Question]:
        """All questions of a split, in an order that does not change between runs."""
        raise NotImplementedError

    def fresh(self, rng: Random) -> Iterator[Question]:
        """Yield questions to learn from, none of the eval split, for ever."""
        known = self.load("train")
        while True:
            yield rng.choice(known)


class Procedural(Questions):
    """Base of sources that make questions up: `draw` makes one, fixed seeds make the splits.

    The eval questions depend on no other knob than those of `draw` and num_eval, are distinct, and
    occur neither in training nor among the fresh ones.
    """

    def __init__(self, *, num_train: int, num_eval: int) -> None:
        if num_train < 1 or num_eval < 1:
            raise ValueError(
                f"num_train={num_train}, num_eval={num_eval}: no split can do without a question"
            )
        self._num_train, self._num_eval = num_train, num_eval

    def draw(self, rng: Random) -> Question:
        """One question."""
        raise NotImplementedError

    def load(self, split: Split) -> Sequence[Question]:
        """Distinct questions, num_train or num_eval of them."""
        return self._eval if split == "eval" else self._train

    def fresh(self, rng: Random) -> Iterator[Question]:
        """Yield newly made questions."""
        held_out = {question.text for question in self._eval}
        while True:
            question = self.draw(rng)
            if question.text not in held_out:
                yield question

    @cached_property
    def _eval(self) -> list[Question]:
        return self._distinct("eval", self._num_eval, set())

    @cached_property
    def _train(self) -> list[Question]:
        return self._distinct("train", self._num_train, {question.text for question in self._eval})

    def _distinct(self, split: Split, count: int, taken: set[str]) -> list[Question]:
        rng = Random(f"{type(self).__name__}/{split}")
        questions: list[Question] = []
        for _ in range(MAX_TRIES * count):
            question = self.draw(rng)
            if question.text not in taken:
                taken.add(question.text)
                questions.append(question)
                if len(questions) == count:
                    return questions
        raise ValueError(
            f"num_{split}={count}: there are too few different questions ({len(questions)} found); "
            "lower it, or allow harder ones"
        )
