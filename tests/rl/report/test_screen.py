"""What the screen shows of a run folder, with and without a terminal, and what it puts up with."""

import io
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from rl.report.panel import RunView
from rl.report.screen import LivePainter, PlainPainter, Screen, final_summary
from rl.run.folder import RunFolder
from rl.run.metrics import MetricsFile
from rl.run.status import PartStatus, Status
from rl.run.warning_lines import noting_warnings
from tests.support.metrics import STEP


class Terminal(io.StringIO):
    """A terminal that remembers what was written to it."""

    def isatty(self):
        return True


def view_that_waits(age):
    """A run whose rollouts process has been in one phase for `age` seconds at 1000 s."""
    waiting = {"rollouts": PartStatus("waiting for batch 3", 1000.0 - age, 1)}
    row = {"step": 2, "time": 900.0, **STEP}
    return RunView("name", 100, started=800.0, done=3, rows=[row], statuses=waiting)


def plain(folder, max_steps=100):
    output = io.StringIO()
    return Screen(RunFolder(folder), max_steps, Console(file=output, force_terminal=True)), output


def test_without_a_terminal_there_are_plain_lines_and_no_escape_codes(tmp_path):
    Status(RunFolder(tmp_path), "inference").set("starting vLLM (logs/inference.log)")
    screen, output = plain(tmp_path, max_steps=50)
    metrics = MetricsFile(RunFolder(tmp_path))
    with screen:
        for step in range(50):
            metrics.append(step, STEP)
            screen.update()
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    assert lines[0].endswith("inference: starting vLLM (logs/inference.log)")
    assert [line.split()[0] for line in lines[1:]] == [
        "1/50",
        "2/50",
        "3/50",
        "4/50",
        "5/50",
        "50/50",
    ]
    assert "reward    0.250" in lines[1]


def test_a_run_that_ends_early_still_prints_its_last_step(tmp_path):
    screen, output = plain(tmp_path)
    metrics = MetricsFile(RunFolder(tmp_path))
    with screen:
        for step in range(8):
            metrics.append(step, STEP)
            screen.update()
    assert output.getvalue().splitlines()[-1].startswith("  8/100 steps")


def test_a_phase_that_lasts_is_told_at_thirty_seconds_and_at_each_doubling(tmp_path):
    screen, output = plain(tmp_path)
    with screen:
        for age in range(130):
            screen._painter.paint(view_that_waits(age), 1000.0, False)
    told = [line for line in output.getvalue().splitlines() if "(for" in line]
    assert [line.partition("(for ")[2] for line in told] == ["31 s)", "1 m 02 s)", "2 m 04 s)"]


def test_a_resumed_run_does_not_print_the_steps_of_the_run_before(tmp_path):
    MetricsFile(RunFolder(tmp_path)).append(0, STEP)
    time.sleep(0.01)
    screen, output = plain(tmp_path)
    with screen:
        screen.update()
        MetricsFile(RunFolder(tmp_path)).append(1, STEP)
    assert [line.split()[0] for line in output.getvalue().splitlines()] == ["2/100"]


def test_a_resumed_run_begins_where_its_last_checkpoint_is_not_with_the_steps_done_again(tmp_path):
    metrics, terminal = MetricsFile(RunFolder(tmp_path)), Terminal()
    for step in range(13):
        metrics.append(step, STEP)
    console = Console(file=terminal, force_terminal=True, width=80)
    with Screen(RunFolder(tmp_path), 60, console, num_saved=10):
        assert " 10 of 60 steps" in terminal.getvalue()
        metrics.truncate_after(9)  # by the trainer, half a minute later
        metrics.append(10, STEP)
    assert " 13 of 60 steps" not in terminal.getvalue()
    assert " 11 of 60 steps" in terminal.getvalue()


def test_on_a_terminal_nothing_is_redrawn_until_something_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    terminal = Terminal()
    MetricsFile(RunFolder(tmp_path)).append(0, STEP)
    with Screen(
        RunFolder(tmp_path), 10, Console(file=terminal, force_terminal=True, width=80)
    ) as screen:
        before = terminal.tell()
        screen.update()
        assert terminal.tell() == before
        MetricsFile(RunFolder(tmp_path)).append(1, STEP)
        screen.update()
        assert terminal.tell() > before
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


def test_damaged_files_do_not_reach_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('nonsense\n{"step": 0, "train/reward": "x"}\n[]\n{"st')
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "trainer.json").write_text("{")
    for console in (Console(file=Terminal(), force_terminal=True), Console(file=io.StringIO())):
        with Screen(RunFolder(tmp_path), 10, console) as screen:
            screen.update()


def test_a_terminal_that_goes_away_costs_the_screen_and_not_the_run(tmp_path, caplog):
    class Gone(Terminal):
        def write(self, text):
            raise OSError("gone")

    with Screen(RunFolder(tmp_path), 10, Console(file=Gone(), force_terminal=True)) as screen:
        screen.update()
        screen.update()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_final_summary_says_what_came_out_and_how_to_go_on(tmp_path):
    folder = tmp_path / "my-run"
    metrics = MetricsFile(RunFolder(folder))
    for step in range(20):
        metrics.append(step, {**STEP, "train/reward": step / 20, "eval/reward": step / 10})
    for name in ("step_000010", "step_000020"):
        (folder / "checkpoints" / name / "hf").mkdir(parents=True)
    (folder / "overrides.yaml").write_text(json.dumps({"overrides": ["loss=grpo", "resume=true"]}))
    text = final_summary(RunFolder(folder))
    for shown in (
        "20 steps in 1 m 20 s",
        "0.100 (first 5) -> 0.725 (last 10), best 0.950 at step 19",
        "0.000 -> 1.900",
        "20,000, 250 a second",
        "update 75%, wait 25%",
        "0.00123 on average, 0.03 at most",
        "step_000020/hf",
        "\ngo on        python train.py loss=grpo run_name=my-run resume=true",
    ):
        assert shown in text
    (folder / "checkpoints").rename(folder / "elsewhere")  # nothing of it is left to go on from
    assert "\nagain        python train.py" in final_summary(RunFolder(folder))
    (folder / "config.yaml").write_text("max_steps: 20")
    assert "resume=true" not in final_summary(RunFolder(folder))


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ([0.2], "reward  0.200, best"),
        ([0.2, 0.4], "reward  0.200 (first 1) -> 0.400 (last 1), best"),
        ([0.1, 0.3, 0.9, 0.5, 0.7], "reward  0.200 (first 2) -> 0.600 (last 2), best"),
    ],
)
def test_the_first_and_the_last_steps_of_a_short_run_are_different_ones(rewards, shown, tmp_path):
    metrics = MetricsFile(RunFolder(tmp_path))
    for step, reward in enumerate(rewards):
        metrics.append(step, {"train/reward": reward})
    assert shown in final_summary(RunFolder(tmp_path))


def test_rollouts_that_failed_stand_in_the_lines_and_in_the_summary(tmp_path):
    screen, output = plain(tmp_path)
    metrics = MetricsFile(RunFolder(tmp_path))
    with screen:
        for errors in (0.0, 0.12):
            metrics.append(int(errors > 0), {**STEP, "rollout/errors": errors})
            screen.update()
    assert ["failed" in line for line in output.getvalue().splitlines()] == [False, True]
    assert "failed 12.0%" in output.getvalue()
    assert "6.0% of the rollouts" in final_summary(RunFolder(tmp_path))


def test_runs_side_by_side_on_one_terminal_draw_one_panel(tmp_path):
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        console = Console(file=terminal, force_terminal=True, width=80)
        screens = [Screen(RunFolder(tmp_path), 10, console) for _ in range(3)]
        with screens[0], screens[1]:
            painters = [screen._painter for screen in screens[:2]]
        with screens[2]:
            painters.append(screens[2]._painter)
    os.close(ours)
    assert list(map(type, painters)) == [LivePainter, PlainPainter, LivePainter]


def test_the_final_summary_of_a_run_without_a_step_is_no_error(tmp_path):
    assert "0 steps" in final_summary(RunFolder(tmp_path))


def test_neither_torch_nor_wandb_is_imported_by_the_screen():
    modules = "rl.report.screen, rl.report.sweep_summary"
    code = f"import sys, {modules}; assert not {{'torch', 'wandb'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_warning_of_another_process_is_said_once_on_the_screen_and_stands_in_its_log(
    tmp_path, capsys
):
    log = logging.getLogger("my_env")
    for terminal in (True, False):
        run_folder = RunFolder(tmp_path / str(terminal))
        output = Terminal() if terminal else io.StringIO()
        console = Console(file=output, force_terminal=terminal, width=80)
        with Screen(run_folder, 10, console) as screen, noting_warnings(run_folder, "rollouts"):
            for _ in range(2):
                log.warning("the judge is [bold]slow\x07")
                log.info("nobody wants to know")
                screen.update()
        assert output.getvalue().count("rollouts: the judge is [bold]slow") == 1
        assert "\x07" not in output.getvalue()
        assert "nobody wants to know" not in output.getvalue()
    assert capsys.readouterr().err.count("the judge is") == 2  # the panel holds back the others
