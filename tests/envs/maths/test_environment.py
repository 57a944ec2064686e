"""Maths: rewards of a transcript, and the expert's demonstrations."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.episode import Episode, Example
from envs.maths.environment import Maths
from envs.maths.grading import Grader
from envs.maths.questions import Question, QuestionSource
from envs.maths.word_problems import WordProblems


class Given(QuestionSource):
    """A source with the same questions in both splits."""

    def __init__(self, *questions):
        self._questions = questions

    def load(self, split):
        return self._questions

    def check(self):
        raise ValueError("no such file")


GRADER = Grader(workers=1, cpu_seconds=5, memory_mb=1024, allow_without_landlock=False)
OPTIONS = {
    "name": "maths",
    "questions": WordProblems(min_steps=1, max_steps=3, num_train=50, num_eval=20),
    "instruction": "Box it.",
    "grader": GRADER,
    "reward_weights": {"correct": 1.0, "format": 0.5},
}


@pytest.fixture(autouse=True, scope="module")
def _processes_end():
    yield
    GRADER.close()


def make(**changes):
    return Maths(**{**OPTIONS, **changes})


def scores(example, said):
    messages = [*example.messages, {"role": "assistant", "content": said}]
    return asyncio.run(make().score(Episode(example, messages, turns=1)))


@pytest.mark.parametrize(
    ("answer", "said", "correct", "form"),
    [
        ("18", r"12 + 6 = 18" + "\n" + r"\boxed{18}", 1, 1),
        ("18", "#### 18", 1, 1),
        ("18", "12 + 6 = 18", 1, 0),
        ("18", r"<think>\boxed{18}</think> 18", 1, 0),
        ("18", r"<think>so \boxed{18}", 0, 0),  # reasoning without an end has no answer
        ("18", r"without <think>: \boxed{18}", 1, 1),
        ("18", r"\boxed{19}, no, \boxed{18}", 1, 1),
        ("18", r"\boxed{18}, no, \boxed{19}", 0, 1),
        ("2x", r"\boxed{x + x}", 1, 1),
        ("18", r"<think>\boxed{18}</think>\boxed{17}", 0, 1),
        ("18", r"\boxed{18", 1, 0),  # cut off, so the last number counts
        ("18", r"18 is not \boxed{}", 0, 0),
        ("18", "", 0, 0),
        ("18", "\ufffd\ufffd {}{ \\boxed", 0, 0),
    ],
)
def test_rewards_of_a_transcript(answer, said, correct, form):
    example = Example(id=0, env="maths", messages=[], info={"answer": answer})
    assert scores(example, said) == {"correct": correct, "format": form, "unjudged": 0.0}


def test_an_answer_that_takes_too_long_to_compare_is_wrong_and_counted(monkeypatch):
    async def too_slow(*_):
        return None

    monkeypatch.setattr(GRADER, "means_same", too_slow)
    example = Example(id=0, env="maths", messages=[], info={"answer": "1"})
    scored = scores(example, r"\boxed{10^{10^{10}}}")
    assert scored == {"correct": 0.0, "format": 1.0, "unjudged": 1.0}


def test_the_expert_scores_one_and_shows_no_eval_question():
    env = make()
    held_out = {e.messages[0]["content"] for e in env.examples("eval")}
    for question, solution in islice(env.demonstrations(Random(0)), 50):
        assert question["content"] not in held_out
        assert question["content"].endswith("?\nBox it.")
        answer = solution["content"].rpartition("= ")[2].partition("\n")[0]
        example = Example(0, "maths", [question], {"answer": answer})
        assert scores(example, solution["content"])["correct"] == 1.0
        assert scores(example, "no idea")["correct"] == 0.0


def test_questions_without_a_solution_cannot_be_imitated(monkeypatch):
    env = make(questions=Given(Question("6 * 7?", "42")), instruction="")
    assert env.examples("train")[0].messages == [{"role": "user", "content": "6 * 7?"}]
    with pytest.raises(ValueError, match=r"come without solutions.*model.warm_start=null"):
        next(env.demonstrations(Random(0)))
    monkeypatch.setattr(GRADER, "check_machine", lambda: None)
    with pytest.raises(ValueError, match="no such file"):
        env.check_machine()
