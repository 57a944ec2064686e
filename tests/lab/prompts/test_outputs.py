"""The result files of a search, with numbers worked by hand, and the commands that it prints."""

import json
import math
import shlex
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from envs.episode import Example
from lab.evaluation.settings import check_evaluation
from lab.prompts import outputs
from lab.prompts.describe import Task
from rl.config.check import check
from rl.runtime.folder import RunFolder
from tests.lab.evaluation.test_settings import HUB, REMOTE
from tests.support.composing import composed

TASKS = [Task("eval", Example(id=i, env="e", messages=[])) for i in (7, 3, 5)]
LOCAL = {"env": "reverse-text", "model": "hf", "client": "renderer"}
HARD = ["+env@env.envs.hard=arithmetic", "+env.weights.hard=1"]
SEARCH = ["max_calls=9", "reflection.base_url=http://x/v1", "run_name=a", "env.system_prompt=Hm."]


def candidates(*scores):
    made = outputs.Candidate
    return [made(f"prompt {i}", [0] * (i > 0), 10 * i, own) for i, own in enumerate(scores)]


def test_the_gain_is_the_mean_difference_of_what_both_scored_with_its_standard_error():
    found = candidates([0.0, 0.5, None], [1.0, 1.0, 0.0])
    mean, error = outputs.gain(found)
    assert mean == pytest.approx((1.0 + 0.5) / 2)
    # The differences 1 and 0.5 have the variance 0.125; of their mean, half of it.
    assert error == pytest.approx(math.sqrt(0.125 / 2))
    assert [one.mean for one in found] == [0.25, pytest.approx(2 / 3)]
    assert math.isnan(outputs.gain(candidates([0.0], [1.0]))[1])
    assert outputs.gain(candidates([0.5, 0.5])) == (0.0, 0.0)


def test_a_prompt_that_is_no_better_replaces_none():
    assert outputs.index_of_best(candidates([0.5, 0.5], [1.0, 0.0])) == 0
    assert outputs.index_of_best(candidates([0.5, 0.5], [1.0, 0.5], [0.5, 1.0])) == 1


def test_a_prompt_gains_nothing_from_rollouts_that_fail():
    found = candidates([1.0, 1.0, 0.0, None], [1.0, None, None, 1.0], [1.0, 0.5, 1.0, 0.0])
    assert outputs.compared_means(found) == pytest.approx([2 / 3, 2 / 3, 2.5 / 3])
    assert outputs.index_of_best(found) == 2
    assert outputs.index_of_best(found[:2]) == 0


def test_the_frontier_names_who_is_best_at_each_example_and_leaves_out_what_nobody_scored(tmp_path):
    found = candidates([0.0, 1.0, None], [1.0, 1.0, None])
    outputs.write_outputs(tmp_path, found, TASKS, more=math.nan)

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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "system_prompt.txt").write_text("Better.\n")
    return RunFolder(tmp_path / "mine")


def composed_by(line, tmp_path):
    python, program, *overrides = shlex.split(line)
    assert python == "python"
    return composed(*overrides, f"output_dir={tmp_path}", primary=Path(program).stem)


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        (HUB, {}),
        (["env=arithmetic", *HUB], {"env": "arithmetic"}),
        (["experiment=optimize-gsm8k"], {"env": "gsm8k", "model": "qwen3-0.6b"}),
        (["env=mixture", *HARD, *HUB], {"env": "mixture"}),
    ],
)
def test_the_printed_commands_evaluate_and_train_the_same_policy_with_the_found_prompt(
    overrides, choices, folder, tmp_path
):
    search = composed(*overrides, *SEARCH, primary="optimize_prompt")
    choices = LOCAL | choices
    evaluate, train = outputs.next_commands(folder, [*overrides, *SEARCH], choices, 50)
    evaluation, run = composed_by(evaluate, tmp_path), composed_by(train, tmp_path)

    check_evaluation(evaluation)
    check(run)
    assert evaluation["num_examples"] == 500
    adapted = outputs.next_commands(folder, [*overrides, "adapter_path=mine"], choices, 50)
    assert ["adapter_path=mine" in line for line in adapted] == [True, False]
    for config in (evaluation, run):
        assert config["model"] == search["model"]
        prompt = str(folder.path / "system_prompt.txt")
        assert config["env"] == search["env"] | {"system_prompt": prompt}


def test_one_example_has_no_standard_error_and_none_is_printed(folder, capsys):
    found = [outputs.Candidate("Hm.", [], 0, [0.0]), outputs.Candidate("Better.", [0], 3, [1.0])]
    Console().print(outputs.closing_lines(found, "max_calls=9", Counter(), folder, [], LOCAL))
    screen = " ".join(capsys.readouterr().out.split())
    assert "(+1.000)" in screen
    assert "±" not in screen
    assert "evaluate it on other examples" in screen


def test_a_remote_policy_gets_no_command_that_trains_it(folder, tmp_path):
    choices = LOCAL | {"client": "messages"}
    (evaluate,) = outputs.next_commands(folder, [*REMOTE, *SEARCH], choices, 50)
    assert check_evaluation(composed_by(evaluate, tmp_path)).client["model"] == "name"
