"""Maths questions, and the base classes of the sources that generate or read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from envs.episode import Split
from envs.options import PositiveInt

MAX_TRIES = 20  # maximum number of draws per requested question


@dataclass(frozen=True)
class Question:
    """One question with its answer, and perhaps a worked solution or code."""

    text: str
    answer: str
    solution: str = ""  # worked steps, without a line for the final answer; empty: unknown
    code: str = ""  # Python code, whose last line evaluates to the answer; empty: unknown


class QuestionSource:
    """Base class of all question sources. Constructors are cheap; `load` may read files."""

    def check(self) -> None:
        """Check quickly, before the run, that questions can be read. Raise ValueError if not."""

    def load(self, split: Split) -> Sequence[Question]:
        """Return all questions of a split, in an order that does not change between runs."""
        raise NotImplementedError

    def sample_questions(self, rng: Random) -> Iterator[Question]:
        """Yield random training questions, without end. None of them is in the eval split."""
        questions = self.load("train")
        while True:
            yield rng.choice(questions)


class GeneratedQuestions(QuestionSource):
    """Base class of sources that generate questions. `load` calls `draw` with fixed seeds.

    The train split and `sample_questions` exclude the eval questions.
    """

    def __init__(self, *, num_train: PositiveInt, num_eval: PositiveInt) -> None:
        self._num_train, self._num_eval = num_train, num_eval

    def draw(self, rng: Random) -> Question:
        raise NotImplementedError

    def load(self, split: Split) -> Sequence[Question]:
        return self._eval_questions if split == "eval" else self._train_questions

    def sample_questions(self, rng: Random) -> Iterator[Question]:
        held_out = {question.text for question in self._eval_questions}
        while True:
            question = self.draw(rng)
            if question.text not in held_out:
                yield question

    @cached_property
    def _eval_questions(self) -> list[Question]:
        return self._draw_distinct("eval", self._num_eval, set())

    @cached_property
    def _train_questions(self) -> list[Question]:
        return self._draw_distinct("train", self._num_train, {q.text for q in self._eval_questions})

    def _draw_distinct(self, split: Split, count: int, taken: set[str]) -> list[Question]:
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
            f"num_{split}={count}, but only {len(questions)} different questions were found: lower "
            f"num_{split}, or set the other options so that more questions exist"
        )
