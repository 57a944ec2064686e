"""The content of the live panel, and its size."""

import io

import pytest
from rich.console import Console

from rl.runtime.status import ProcessStatus
from rl.terminal.panel import Chart, RunView, live_panel, number
from tests.support.metrics import STEP


def drawn(view, now=1000.0, width=80):
    """Return the panel as lines of text."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(live_panel(view, now))
    return console.file.getvalue().splitlines()


def a_view(num_steps=30, **statuses):
    view = RunView("reverse-text-cispo-s0", 100, started=900.0, statuses=statuses)
    for step in range(num_steps):
        view.add({"step": step, "time": 900.0 + step, **STEP, "train/reward": step / 100})
    return view


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_fits_its_width_and_height(width):
    waits = ProcessStatus("waiting for vLLM to start (logs/inference.log)" + " long" * 20, 990.0, 1)
    lines = drawn(a_view(inference=waits, trainer=waits), width=width)
    assert len(lines) <= 20
    assert max(map(len, lines)) <= width


def test_the_panel_shows_the_last_numbers_and_the_remaining_time():
    lines = drawn(a_view())
    for shown in ("30 of 100 steps", "0.290", "12,345", "3.0e-04", "0.00123", "0.4%", "4.00 s",
                  "last 10 ", "wait 25%", "update 75%"):  # fmt: skip
        assert shown in "\n".join(lines)
    # 70 steps of 4 s are left, and 71 s have passed since the last step.
    assert "1 m 40 s, about 3 m 29 s left" in lines[0]
    assert "last 3 " in "\n".join(drawn(a_view(3)))  # a mean of fewer than ten steps


def test_before_the_first_step_the_panel_shows_what_each_process_waits_for():
    text = "\n".join(drawn(a_view(0, inference=ProcessStatus("starting vLLM", 962.0, 1))))
    assert "starting vLLM" in text
    assert "38 s" in text
    assert "reward" not in text


def test_a_panel_needs_no_metric_and_shows_alarms_only_if_they_are_not_zero():
    view = RunView("name", 10, started=0.0)
    view.add({"step": 0})
    assert "1 of 10 steps" in "\n".join(drawn(view))
    assert "failed" not in "\n".join(drawn(view))
    view.add({"step": 1, "rollout/errors": 0.25, "train/skipped": 1.0})
    assert "25.0% of rollouts failed" in "\n".join(drawn(view))
    assert "step skipped" in "\n".join(drawn(view))


def test_ranks_share_a_line_except_the_one_that_lags():
    ranks = {f"trainer.rank{r}": ProcessStatus("waiting for batch 7", 990.0, r) for r in range(4)}
    ranks["trainer.rank2"] = ProcessStatus("training step 6", 900.0, 2)
    words = [line.split()[:2] for line in drawn(a_view(0, **ranks))[-2:]]
    assert words == [["trainer", "x3"], ["trainer.rank2", "training"]]


@pytest.mark.parametrize(
    ("doing", "age", "highlighted"),
    [
        ("waiting for batch 3", 29, False),
        ("waiting for batch 3", 31, True),
        ("serving", 999, False),
    ],
)
def test_only_phases_that_should_be_short_are_highlighted_when_long(doing, age, highlighted):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(live_panel(a_view(0, rollouts=ProcessStatus(doing, 1000.0 - age, 1)), 1000.0))
    assert ("\x1b[33m" in console.file.getvalue()) is highlighted


def test_a_repeated_step_replaces_the_steps_after_it():
    view = a_view(30)
    view.add({"step": 10, "time": 950.0, "train/reward": 0.5})
    assert view.done == 11
    assert list(view.rewards) == list(range(11))
    assert [row["step"] for row in view.rows][-1] == 10


def printed(picture, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(picture)
    return console.file.getvalue()


def test_a_chart_fits_its_width_and_averages_values_of_one_column():
    top, bottom = printed(Chart([index / 100 for index in range(100)], rows=2), 40).splitlines()
    assert max(len(top), len(bottom)) <= 40
    assert bottom.startswith("▁")
    assert top.endswith("█")
    assert printed(Chart([0.0, 1.0, 0.5, 0.5], rows=1), 2) == "▁▁\n"
    assert printed(Chart([], rows=2), 40) == "\n\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0.000"), (-0.0123, "-0.012"), (2e-5, "2.0e-05"), (123.45, "123.5"),
     (9e4, "90,000")],
)  # fmt: skip
def test_numbers_keep_a_steady_width(value, text):
    assert number(value) == text
