"""The content of the live panel, and its size."""

import io

import pytest
from rich.console import Console

from rl.runtime.status import ProcessStatus
from rl.terminal.panel import RunView, format_number, format_time, live_panel, time_shares
from tests.support.metrics import STEP

MORE = {"train/clip_fraction": 0.125, "rollout/zero_spread": 0.5, "eval/reward": 0.75}


def drawn(view, now=1000.0, width=80, *, in_color=False):
    """Return the panel as lines of text."""
    color = "standard" if in_color else None
    console = Console(file=io.StringIO(), width=width, force_terminal=in_color, color_system=color)
    console.print(live_panel(view, now))
    return console.file.getvalue().splitlines()


def a_view(num_steps=30, **statuses):
    view = RunView("reverse-text-cispo-s0", 100, started=900.0, statuses=statuses)
    for step in range(num_steps):
        times = {"time/wait": 0.5 + step % 2, "time/step": 3.5 + step % 2}  # the means: 1 and 4
        old = {name: 99.0 for name in times if step < num_steps - 20}
        row = {"step": step, "time": 900.0 + step, **STEP, **times, **old, **MORE}
        view.add({**row, "train/reward": step * 7 % 30 / 100})  # 0.29 at step 17
    return view


def test_the_panel_fits_its_width_and_height():
    waits = ProcessStatus("waiting for vLLM to start (logs/inference.log)" + " long" * 20, 990.0, 1)
    for width in (60, 80, 120):
        lines = drawn(a_view(inference=waits, trainer=waits), width=width)
        assert len(lines) <= 20
        assert max(map(len, lines)) <= width


def test_the_panel_shows_the_last_numbers_and_the_remaining_time():
    lines = drawn(a_view())
    assert " 30 of 100 steps" in lines[1]
    assert [" ".join(line.split()) for line in lines[3:10]] == [
        "reward 0.230 last 10 0.155 best 0.290",
        "loss -0.012 entropy 1.500 grad norm 0.400",
        "learning rate 3.0e-04 clipped 12.5% no spread 50.0%",
        "tokens/s 12,345 mean length 9.3 truncated 0.4%",
        "staleness 0.50 max staleness 1 mismatch 0.00123",
        "evaluation 0.750",
        "",
    ]
    assert lines[10] == "time per step  4.00 s  update 75%, wait 25%"
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


def test_ranks_in_one_phase_share_a_line_and_a_slow_phase_is_highlighted():
    statuses = {
        "trainer.rank0": ProcessStatus("training step 4: 2 of 4", 990.0, 1),
        "trainer.rank1": ProcessStatus("training step 4: 1 of 4", 969.0, 2),
        "inference0": ProcessStatus("serving", 100.0, 3),
        "inference1": ProcessStatus("starting vLLM", 970.0, 4),
        "rollouts": ProcessStatus("loading the environment", 969.0, 5),
    }
    view = RunView("x", 9, statuses=statuses)
    assert [" ".join(line.split()) for line in drawn(view)[3:]] == [
        "inference0 serving 15 m 00 s",
        "inference1 starting vLLM 30 s",
        "rollouts loading the environment 31 s",
        "trainer x2 training step 4: 1 of 4 31 s",
    ]
    colored = drawn(view, in_color=True)[3:]
    assert ["\x1b[33m" in line for line in colored] == [False, False, True, True]


@pytest.mark.parametrize(
    ("shown", "texts"),
    [(format_number, {
        1000.0: "1,000", -999.9: "-999.9", 100.0: "100.0", 99.9: "99.900", 0.001: "0.001",
        0.0009: "9.0e-04", 0.0: "0.000", None: "-",
    }), (format_time, {
        -1.0: "0 s", 59.4: "59 s", 59.6: "1 m 00 s", 60.0: "1 m 00 s", 3599.0: "59 m 59 s",
        3600.0: "1 h 00 m", 90_059.0: "25 h 00 m",
    })],
)  # fmt: skip
def test_numbers_and_times_have_few_digits(shown, texts):
    assert {number: shown(number) for number in texts} == texts
    assert time_shares([{"time/a": 1.0, "time/b_c": 3.0, "time/d": 0.0}]) == "b c 75%, a 25%"
