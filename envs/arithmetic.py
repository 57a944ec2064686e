"""Single-turn environment: the policy adds, subtracts or multiplies two whole numbers.

    3 + 4 =   ->   7          3 - 4 =   ->   -1

There are few questions (1323 for operands up to 20 and three operators). A training split with more
examples repeats questions. The eval questions are distinct and never occur in training.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from random import Random
from typing import ClassVar

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, user
from envs.options import NonNegativeInt, PositiveInt
from envs.protocol import Environment, check_weights
from envs.rewards import final_text

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(kw_only=True, eq=False)
class Arithmetic(Environment):
    """The environment arithmetic. conf/env/arithmetic.yaml explains the options."""

    name = "arithmetic"
    REWARDS: ClassVar[Sequence[str]] = ("correct",)  # names of the rewards that `score` returns

    max_operand: NonNegativeInt
    operators: Sequence[str]
    num_train: PositiveInt
    num_eval: PositiveInt
    reward_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        operators = self.operators
        if not operators or set(operators) - set(OPERATORS) or len(set(operators)) < len(operators):
            raise ValueError(
                f"operators={list(operators)}: list one or more of {' '.join(OPERATORS)}, each once"
            )
        self._num_questions = len(operators) * (self.max_operand + 1) ** 2
        if self.num_eval >= self._num_questions:
            raise ValueError(
                f"num_eval={self.num_eval} leaves no questions for training, because max_operand="
                f"{self.max_operand} and {len(operators)} operators make only "
                f"{self._num_questions} questions: raise max_operand or lower num_eval"
            )
        check_weights(self.reward_weights, self.REWARDS)

    def examples(self, split: Split) -> list[Example]:
        indices = self._eval_indices if split == "eval" else self._train_indices
        questions = map(self._question, indices)
        return [
            Example(id=i, env=self.name, messages=[message], info={"answer": answer})
            for i, (message, answer) in enumerate(questions)
        ]

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return `correct`, which is 1 if the answer is exactly the correct number, else 0."""
        return {"correct": float(final_text(episode) == episode.example.info["answer"])}

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        held_out = set(self._eval_indices)
        while True:
            index = rng.randrange(self._num_questions)
            if index not in held_out:
                message, answer = self._question(index)
                yield [message, assistant(answer)]

    @cached_property
    def _eval_indices(self) -> list[int]:
        return Random("arithmetic/eval").sample(range(self._num_questions), self.num_eval)

    @cached_property
    def _train_indices(self) -> list[int]:
        held_out = set(self._eval_indices)
        count = min(self._num_questions, self.num_train + self.num_eval)
        drawn = Random("arithmetic/train").sample(range(self._num_questions), count)
        distinct = (index for index in drawn if index not in held_out)
        return list(islice(cycle(distinct), self.num_train))

    def _question(self, index: int) -> tuple[Message, str]:
        index, b = divmod(index, self.max_operand + 1)
        which, a = divmod(index, self.max_operand + 1)
        sign = self.operators[which]
        return user(f"{a} {sign} {b} ="), str(OPERATORS[sign](a, b))
