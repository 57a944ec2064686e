"""What the live panel says, and that it fits."""

import io

import pytest
from rich.console import Console

from rl.report.panel import Chart, RunView, SplitBar, live_panel, number
from rl.run.status import PartStatus
from tests.support.metrics import STEP


def drawn(view, now=1000.0, width=80):
    """The panel as lines of text."""
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
    waits = PartStatus("waiting for vLLM to start (logs/inference.log)" + " long" * 20, 990.0, 1)
    lines = drawn(a_view(inference=waits, trainer=waits), width=width)
    assert len(lines) <= 20
    assert max(map(len, lines)) <= width


def test_the_panel_shows_the_last_numbers():
    text = "\n".join(drawn(a_view()))
    for shown in ("30 of 100 steps", "0.290", "12,345", "3.0e-04", "0.00123", "0.4%", "4.00 s"):
        assert shown in text
    assert "last 10 " in text
    assert "wait 25%" in text
    assert "update 75%" in text


def test_the_remaining_time_follows_from_the_last_steps():
    # 70 steps of 4 s, of which the next began 71 s ago
    assert "1 m 40 s, about 3 m 29 s left" in drawn(a_view())[0]


def test_before_the_first_step_the_panel_shows_who_waits_for_whom():
    text = "\n".join(drawn(a_view(0, inference=PartStatus("starting vLLM", 962.0, 1))))
    assert "starting vLLM" in text
    assert "38 s" in text
    assert "reward" not in text


def test_a_mean_of_fewer_steps_than_ten_says_of_how_many():
    text = "\n".join(drawn(a_view(3)))
    assert "3 of 100 steps" in text
    assert "last 3 " in text


def test_a_panel_needs_no_metric():
    view = RunView("name", 10, started=0.0)
    view.add({"step": 0})
    assert "1 of 10 steps" in "\n".join(drawn(view))


def test_what_should_be_zero_is_mentioned_when_it_is_not():
    view = a_view()
    assert "failed" not in "\n".join(drawn(view))
    view.add({"step": 30, "rollout/errors": 0.25, "train/skipped": 1.0})
    assert "25.0% of rollouts failed" in "\n".join(drawn(view))
    assert "step skipped" in "\n".join(drawn(view))


def test_ranks_share_a_line_except_the_one_that_lags():
    ranks = {f"trainer.rank{r}": PartStatus("waiting for batch 7", 990.0, r) for r in range(4)}
    ranks["trainer.rank2"] = PartStatus("training step 6", 900.0, 2)
    lines = drawn(a_view(0, **ranks))
    assert [line.split()[:2] for line in lines[-2:]] == [
        ["trainer", "x3"],
        ["trainer.rank2", "training"],
    ]


@pytest.mark.parametrize(
    ("doing", "age", "highlighted"),
    [
        ("waiting for batch 3", 29, False),
        ("waiting for batch 3", 31, True),
        ("serving", 999, False),
    ],
)
def test_only_what_takes_long_and_should_not_is_highlighted(doing, age, highlighted):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(live_panel(a_view(0, rollouts=PartStatus(doing, 1000.0 - age, 1)), 1000.0))
    assert ("\x1b[33m" in console.file.getvalue()) is highlighted


def test_a_step_that_comes_again_after_a_restart_replaces_what_followed_it():
    view = a_view(30)
    view.add({"step": 10, "time": 950.0, "train/reward": 0.5})
    assert view.done == 11
    assert list(view.rewards) == list(range(11))
    assert [row["step"] for row in view.rows][-1] == 10


def test_a_chart_rises_with_its_values_and_never_leaves_its_width():
    console = Console(file=io.StringIO(), width=40)
    console.print(Chart([index / 100 for index in range(100)], rows=2))
    top, bottom = console.file.getvalue().splitlines()
    assert max(len(top), len(bottom)) <= 40
    assert bottom.startswith("▁")
    assert top.endswith("█")
    console.print(Chart([], rows=2), Chart([1.0], rows=2))


def test_a_column_of_a_chart_is_the_mean_of_its_values():
    console = Console(file=io.StringIO(), width=2)
    console.print(Chart([0.0, 1.0, 0.5, 0.5], rows=1))
    assert console.file.getvalue() == "▁▁\n"


def test_the_parts_of_a_split_bar_fill_it_exactly():
    console = Console(file=io.StringIO(), width=37)
    console.print(SplitBar({"wait": 1 / 3, "update": 1 / 3, "push": 1 / 6, "other": 1 / 6}))
    assert console.file.getvalue().rstrip("\n") == "━" * 37


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0.000"),
        (-0.0123, "-0.012"),
        (2e-5, "2.0e-05"),
        (123.45, "123.5"),
        (9e4, "90,000"),
    ],
)
def test_numbers_keep_a_steady_width(value, text):
    assert number(value) == text
