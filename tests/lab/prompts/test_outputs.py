"""The result files of a search, with numbers worked by hand."""

import json
import math

import pytest

from envs.episode import Example
from lab.prompts.describe import Task
from lab.prompts.outputs import Candidate, gain, index_of_best, write_outputs

TASKS = [Task("eval", Example(id=i, env="e", messages=[])) for i in (7, 3, 5)]


def candidates(*scores: list[float | None]) -> list[Candidate]:
    return [Candidate(f"prompt {i}", [0] * (i > 0), 10 * i, own) for i, own in enumerate(scores)]


def test_the_gain_is_the_mean_difference_of_what_both_scored_with_its_standard_error():
    found = candidates([0.0, 0.5, None], [1.0, 1.0, 0.0])
    mean, error = gain(found)
    assert mean == pytest.approx((1.0 + 0.5) / 2)
    # The differences 1 and 0.5 have the variance 0.125; of their mean, half of it.
    assert error == pytest.approx(math.sqrt(0.125 / 2))
    assert [one.mean for one in found] == [0.25, pytest.approx(2 / 3)]


def test_one_example_has_no_standard_error_and_no_gain_is_none():
    assert math.isnan(gain(candidates([0.0], [1.0]))[1])
    assert gain(candidates([0.5, 0.5])) == (0.0, 0.0)


def test_a_prompt_that_is_no_better_replaces_none():
    assert index_of_best(candidates([0.5, 0.5], [1.0, 0.0])) == 0
    assert index_of_best(candidates([0.5, 0.5], [1.0, 0.5], [0.5, 1.0])) == 1
    assert index_of_best(candidates([None, None], [0.0, None], [None, None])) == 1


def test_the_frontier_names_who_is_best_at_each_example_and_leaves_out_what_nobody_scored(tmp_path):
    found = candidates([0.0, 1.0, None], [1.0, 1.0, None])
    write_outputs(tmp_path, found, TASKS, more=math.nan)

    places = map(json.loads, (tmp_path / "pareto_frontier.jsonl").read_text().splitlines())
    assert [(p["place"], p["example"], p["score"], p["candidates"]) for p in places] == [
        *((0, 7, 1.0, [1]), (1, 3, 1.0, [0, 1]), (2, 5, None, []))
    ]
    rows = [json.loads(x) for x in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.5, 1.0]
    assert rows[0]["info"]["scores"] == [0.0, 1.0, None]
    assert (tmp_path / "system_prompt.txt").read_text() == "prompt 1\n"
    summary = json.loads((tmp_path / "metadata.json").read_text())
    assert (summary["best"], summary["start_score"], summary["more"]) == (1, 0.5, None)
    assert not list(tmp_path.glob(".*"))
