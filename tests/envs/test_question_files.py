"""Questions out of files and data sets: what is read, held out, refused."""

import importlib.util
import json
import sys
from random import Random

import pytest

from envs.question_files import FileQuestions, HubQuestions
from envs.questions import Question

KEYS = {"question_key": "question", "answer_key": "answer"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(*numbers):
    return [{"question": f"q{n}?", "answer": str(n)} for n in numbers]


def of_file(path, **changes):
    return FileQuestions(**{"path": path, "eval_path": None, "num_eval": 2, **KEYS, **changes})


def test_some_of_one_file_are_held_out(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(*range(10)))
    made = of_file(path)
    train, held_out = made.load("train"), made.load("eval")
    assert (len(train), len(held_out)) == (8, 2)
    assert {q.text for q in [*train, *held_out]} == {f"q{n}?" for n in range(10)}
    assert of_file(path).load("eval") == held_out
    fresh = made.fresh(Random(0))
    assert {next(fresh).text for _ in range(200)} == {q.text for q in train}


def test_a_question_of_the_eval_file_is_not_trained_on(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(1, 2, 3, 4))
    held_out = write(tmp_path / "b.jsonl", rows(3, 9, 4))
    made = of_file(path, eval_path=held_out)
    assert [q.text for q in made.load("eval")] == ["q3?", "q9?"]
    assert [q.text for q in made.load("train")] == ["q1?", "q2?", "q4?"]


def test_worked_steps_are_taken_apart_as_in_gsm8k(tmp_path):
    told = "She sells 48/2 = <<48/2=24>>24.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"
    path = write(tmp_path / "a.jsonl", [{"q": " How many? ", "a": told}, {"q": "x", "a": 5}])
    made = of_file(path, num_eval=1, question_key="q", answer_key="a")
    assert {*made.load("train"), *made.load("eval")} == {
        Question("How many?", "72", "She sells 48/2 = 24.\nTogether 48+24 = 72."),
        Question("x", "5"),
    }


def test_a_parquet_file_is_read_alike(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs offbyone[data]")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(rows(*range(5))), tmp_path / "a.parquet")
    lines = write(tmp_path / "a.jsonl", rows(*range(5)))
    for split in ("train", "eval"):
        assert of_file(str(tmp_path / "a.parquet")).load(split) == of_file(lines).load(split)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"question": "q"}\n', r"row 1 has no 'answer' but 'question': set question_"),
        ("a.jsonl", '{"question": "q", "answer": "1"}\n{', "row 2 is not JSON"),
        ("a.jsonl", '{"question": "q", "answer": "1"}\n', "0 questions to train on and 1"),
        ("a.jsonl", "", "0 questions to train on and 0"),
        ("a.csv", "question,answer\n", r"no kind that can be read: use \.jsonl or \.parquet"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_a_remedy(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        of_file(str(tmp_path / name)).load("train")


def test_a_missing_file_is_named(tmp_path):
    made = of_file(str(tmp_path / "none.jsonl"))  # the constructor opens nothing
    with pytest.raises(ValueError, match=r"no file .*none\.jsonl: env\.questions\.path"):
        made.load("eval")


def of_hub(path, **changes):
    knobs = {"path": path, "name": None, "train_split": "train", "eval_split": "test", **KEYS}
    return HubQuestions(**{**knobs, **changes})


def test_a_data_set_in_the_form_of_the_hub_is_read(tmp_path):
    if not importlib.util.find_spec("datasets"):
        pytest.skip("needs offbyone[data]")
    write(tmp_path / "train.jsonl", rows(1, 2, 3))
    write(tmp_path / "test.jsonl", rows(3, 4))
    made = of_hub(str(tmp_path))
    assert [q.answer for q in made.load("train")] == ["1", "2"]
    assert [q.answer for q in made.load("eval")] == ["3", "4"]
    with pytest.raises(ValueError, match=r"\(validation\) cannot be loaded: .*env=word-problems"):
        of_hub(str(tmp_path), eval_split="validation").load("eval")


def test_without_the_extra_the_way_out_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    made = of_hub("openai/gsm8k", name="main")
    with pytest.raises(ValueError, match=r"offbyone\[data\].* or choose env=word-problems"):
        made.load("train")
