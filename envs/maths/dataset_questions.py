"""Read questions from a data set of envs/datasets.py, such as a local file or GSM8K on the hub.

An answer in GSM8K's form (worked steps, then `#### 18`) is split into solution and answer.
"""

import re
from collections.abc import Sequence
from functools import cached_property

from envs.datasets import Dataset
from envs.episode import Example, Split
from envs.maths.questions import Question, QuestionSource


class DataQuestions(QuestionSource):
    def __init__(self, *, dataset: Dataset) -> None:
        self._dataset = dataset

    def check(self) -> None:
        if isinstance(self._dataset, Dataset):  # a user's own data set may have no `check`
            self._dataset.check()

    def load(self, split: Split) -> Sequence[Question]:
        return self._questions_by_split[split]

    @cached_property
    def _questions_by_split(self) -> dict[Split, list[Question]]:
        splits: tuple[Split, ...] = ("train", "eval")
        return {
            split: [question_of(example) for example in self._dataset.examples(split, env="")]
            for split in splits
        }


def question_of(example: Example) -> Question:
    """Convert an example to a question. Raise ValueError if the example has no answer."""
    if "answer" not in example.info:
        raise ValueError(
            f"question {example.id} has no answer: set dataset.answer to the answer's column"
        )
    text, full_answer = example.messages[-1]["content"].strip(), str(example.info["answer"]).strip()
    solution, separator, answer = full_answer.rpartition("####")
    if not separator:
        return Question(text, full_answer)
    solution = re.sub(r"<<[^>]*>>", "", solution).strip()  # remove GSM8K's notes like <<1+2=3>>
    return Question(text, answer.strip(), solution)
