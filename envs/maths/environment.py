r"""Single-turn mathematical questions. Equivalent forms of the answer count as correct.

    Fay has 12 shells. ...            ->   12 + 6 = 18 ... The answer is \boxed{18}

The questions come from a source in envs/maths/: GSM8K, a file, or a generator.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from envs.episode import Episode, Example, Split
from envs.maths.grading import Grader, final_answer, marked_answer
from envs.maths.questions import Question, QuestionSource
from envs.messages import Message, assistant, user
from envs.protocol import Environment, check_weights
from envs.rewards import final_text

REWARDS = ("correct", "format")


@dataclass(kw_only=True, eq=False)
class Maths(Environment):
    """An environment that asks the questions of a source and grades the final answers."""

    name: str = field()
    questions: QuestionSource
    instruction: str  # text on a new line after every question
    grader: Grader
    reward_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        check_weights(self.reward_weights, REWARDS)

    def examples(self, split: Split) -> list[Example]:
        return [
            Example(i, self.name, [self._prompt(question)], {"answer": question.answer})
            for i, question in enumerate(self.questions.load(split))
        ]

    def check_machine(self) -> None:
        self.grader.check_machine()
        self.questions.check()

    async def score(self, episode: Episode) -> dict[str, float]:
        r"""Return three rewards, each 0 or 1.

        correct: the answer (`final_answer` in grading.py) means the same as the example's answer.
        format: the answer is in \boxed{} or after ####.
        unjudged: the answers could not be compared, so the answer counts as wrong.
        """
        answer = final_answer(episode.text)
        same = await self.grader.means_same(episode.example.info["answer"], answer or "")
        return {
            "correct": float(same is True),
            "format": float(bool(marked_answer(final_text(episode)))),
            "unjudged": float(same is None),
        }

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        for question in self.questions.sample_questions(rng):
            turns = self._expert_turns(question)
            if not turns:
                raise ValueError(
                    f"the questions of env {self.name!r} come without solutions, so there are no "
                    "demonstrations: set model.warm_start=null, or sampler=async"
                )
            yield [self._prompt(question), *turns]

    def _expert_turns(self, question: Question) -> list[Message]:
        steps = f"{question.solution}\n{boxed(question.answer)}"
        return [assistant(steps)] if question.solution else []

    def _prompt(self, question: Question) -> Message:
        return user("\n".join(filter(None, [question.text, self.instruction])))


def boxed(answer: str) -> str:
    r"""Return the answer in \boxed{}, as `instruction` in conf/env/ requires."""
    return rf"\boxed{{{answer}}}"
