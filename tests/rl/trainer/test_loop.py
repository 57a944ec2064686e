"""The last version is evaluated after the last step: its line is no step of its own."""

from rl.report.finished_runs import steps_done
from rl.report.panel import RunView
from rl.report.screen import final_summary, with_evaluation
from rl.run.folder import RunFolder
from rl.run.metrics import MetricsFile

STEP = {"train/reward": 0.5, "time/step": 1.0, "eval/reward": 0.25}
LAST = {"eval/reward": 0.75, "eval/pass@1": 0.5}


def test_it_joins_the_last_step_on_the_screen():
    view = RunView("run", 2)
    for row in ({"step": 0, **STEP}, {"step": 1, "train/reward": 0.6}, {"step": 2, **LAST}):
        view.add(with_evaluation(view, row))
    assert view.done == 2
    assert view.rows[-1] == {"step": 1, "train/reward": 0.6, **LAST}


def test_a_step_without_an_evaluation_shows_the_one_before():
    view = RunView("run", 3)
    for row in ({"step": 0, **STEP}, {"step": 1, "train/reward": 0.6}):
        view.add(with_evaluation(view, row))
    assert view.rows[-1]["eval/reward"] == 0.25


def test_it_is_not_counted_as_a_step(tmp_path):
    metrics = MetricsFile(RunFolder(tmp_path))
    metrics.append(0, STEP)
    metrics.append(1, STEP)
    metrics.append(2, LAST)
    summary = final_summary(RunFolder(tmp_path))
    assert "2 steps in" in summary
    assert "0.250 -> 0.750" in summary


def test_steps_are_counted_with_and_without_it():
    rows = [{"step": 0, **STEP}, {"step": 1, **STEP}]
    assert steps_done([]) == 0
    assert steps_done(rows) == steps_done([*rows, {"step": 2, "time": 1.0, **LAST}]) == 2
