"""Questions from data sets: how answers are split, held out and refused."""

import json
from random import Random

import pytest

from envs.datasets import JsonLines
from envs.maths.dataset_questions import DataQuestions
from envs.maths.questions import Question


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(*numbers):
    return [{"question": f"q{n}?", "answer": str(n)} for n in numbers]


def of_file(path, **changes):
    options = {"eval_path": None, "num_eval": 2, "prompt": "question", "answer": "answer"}
    return DataQuestions(dataset=JsonLines(path=path, **{**options, **changes}))


def test_a_question_of_the_eval_file_is_not_trained_on(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(1, 2, 3, 4))
    held_out = write(tmp_path / "b.jsonl", rows(3, 9, 4))
    made = of_file(path, eval_path=held_out)
    assert len(made.load("eval")) == 2  # num_eval
    assert {q.text for q in made.load("eval")} < {"q3?", "q4?", "q9?"}
    assert [q.text for q in made.load("train")] == ["q1?", "q2?"]
    fresh = made.sample_questions(Random(0))
    assert {next(fresh).text for _ in range(200)} == {"q1?", "q2?"}


def test_worked_steps_are_split_from_the_answer_as_in_gsm8k(tmp_path):
    told = "She sells 48/2 = <<48/2=24>>24, not <<48/3=16>>16.\n"
    told += "Together 48+24 = <<48+24=72>>72.\n#### 72"
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    path = write(tmp_path / "a.jsonl", [{"q": " How many? ", "a": told}, {"q": asked, "a": 5}])
    made = of_file(path, num_eval=1, prompt="q", answer="a")
    assert {*made.load("train"), *made.load("eval")} == {
        Question("How many?", "72", "She sells 48/2 = 24, not 16.\nTogether 48+24 = 72."),
        Question("x", "5"),
    }


def test_splits_without_questions_and_questions_without_answers_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(1, 2))
    same = write(tmp_path / "b.jsonl", rows(1, 2))
    with pytest.raises(
        ValueError, match="no rows for training, because all 2 have prompts that are evaluated"
    ):
        of_file(path, eval_path=same).load("train")
    with pytest.raises(ValueError, match="row 1 has no value in the column 'reply'"):
        of_file(path, answer="reply").check()
    bare = write(tmp_path / "c.jsonl", [{"question": "a"}, {"question": "b"}])
    with pytest.raises(ValueError, match=r"question 0 has no answer: set dataset\.answer"):
        of_file(bare, answer=None, num_eval=1).load("train")


def test_a_data_set_without_a_path_is_refused_with_the_same_sentence():
    class Nothing:
        def examples(self, split, *, env):
            return []

    with pytest.raises(
        ValueError, match="data set has no question for the split train: change num_eval"
    ):
        DataQuestions(dataset=Nothing()).load("train")
