"""The content of the live panel, and its size."""

import io

import pytest
from rich.console import Console

from rl.runtime.status import ProcessStatus
from rl.terminal.panel import RunView, live_panel
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
    assert "1 h 04 m" in drawn(a_view(), now=900.0 + 64.4 * 60)[0]
    assert "last 3 " in "\n".join(drawn(a_view(3)))  # a mean of fewer than ten steps


def test_a_panel_needs_no_metric_and_shows_alarms_only_if_they_are_not_zero():
    view = RunView("name", 10, started=0.0)
    view.add({"step": 0})
    assert "1 of 10 steps" in "\n".join(drawn(view))
    assert "failed" not in "\n".join(drawn(view))
    view.add({"step": 1, "rollout/errors": 0.25, "train/skipped": 1.0})
    assert "25.0% of rollouts failed" in "\n".join(drawn(view))
    assert "step skipped" in "\n".join(drawn(view))


def test_a_repeated_step_replaces_the_steps_after_it():
    view = a_view(30)
    view.add({"step": 10, "time": 950.0, "train/reward": 0.5})
    assert view.done == 11
    assert list(view.rewards) == list(range(11))
    assert [row["step"] for row in view.rows][-1] == 10
