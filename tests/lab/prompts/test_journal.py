"""What was answered is answered again, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.prompts.journal import Journal


def journal(path: Path) -> Journal:
    return Journal(path, ("asked",), failed=lambda record: record["said"] is None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    first = journal(tmp_path / "answers.jsonl")
    for asked, said in (("a", 1), ("b", 2), ("a", 3)):
        first.add({"asked": asked, "said": said})
    return tmp_path / "answers.jsonl"


def said(path: Path, *questions: str) -> list[Any]:
    answers = journal(path)
    records = [answers.take({"asked": question}) for question in questions]
    return [record and record["said"] for record in records]


def test_the_nth_time_a_question_is_asked_it_gets_its_nth_answer_in_whatever_order(path):
    assert said(path, "b", "a", "a", "a", "b") == [2, 1, 3, None, None]


def test_an_answer_is_returned_as_it_will_be_read_and_is_not_its_own_next_answer(tmp_path):
    answers = journal(tmp_path / "a.jsonl")
    record = answers.add({"asked": "a", "said": float("nan"), "more": (1, 2)})
    assert record == {"asked": "a", "said": None, "more": [1, 2]}
    assert answers.take({"asked": "a"}) is None


def test_an_incomplete_or_broken_line_costs_only_its_own_answer(path):
    whole = path.read_text()
    path.write_text(whole[:-5].replace("\n", "\n{broken\n[1]\n", 1))
    answers = journal(path)
    assert answers.num_kept == 2
    answers.add({"asked": "c", "said": 4})
    assert said(path, "a", "a", "b", "c") == [1, None, 2, 4]


def test_failures_at_the_end_are_tried_again_and_others_are_answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    records = [{"asked": a, "said": s} for a, s in (("a", None), ("b", 2), ("c", None))]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    answers = journal(path)
    assert answers.take({"asked": "a"}) == {"asked": "a", "said": None}
    assert answers.take({"asked": "c"}) is None
    assert len(path.read_text().splitlines()) == 2  # or the next search would take it for the first
