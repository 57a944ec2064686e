"""The screen of a run on a terminal and in a log file, its panel, and the progress bar."""

import io
import json
import logging
import time

import pytest
from rich.console import Console

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.runtime.status import ProcessStatus, Status
from rl.runtime.warning_lines import noting_warnings
from rl.terminal.panel import RunView, format_number, format_time, live_panel, time_shares
from rl.terminal.progress import Progress
from rl.terminal.screen import Screen, final_summary
from tests.support.metrics import STEP


class Terminal(io.StringIO):
    """A terminal that keeps its output."""

    def isatty(self):
        return True


def on_terminal(file):
    return Console(file=file, force_terminal=True, width=80)


def log_of(folder, max_steps=100, rows=(), **options):
    """Return the lines of a log file to which the screen prints while these rows are written."""
    output, metrics = io.StringIO(), MetricsFile(RunFolder(folder))
    # FORCE_COLOR takes any file for a terminal.
    console = Console(file=output, force_terminal=True)
    with Screen(RunFolder(folder), max_steps, console, **options) as screen:
        for step, row in enumerate(rows):
            metrics.append(step, row)
            screen.update()
    assert "\x1b" not in output.getvalue()
    return output.getvalue().splitlines()


def test_a_log_file_gets_the_start_the_first_steps_and_the_last(tmp_path):
    Status(RunFolder(tmp_path), "inference").set("starting vLLM (logs/inference.log)")
    lines = log_of(tmp_path, 50, [{**STEP, "eval/reward": 0.5}] * 50)
    assert lines[0].endswith("inference: starting vLLM (logs/inference.log)")
    assert [line.split()[0] for line in lines[1:]] == [f"{n}/50" for n in (1, 2, 3, 4, 5, 50)]
    assert " ".join(lines[1].split()).startswith(
        "1/50 steps reward 0.250 loss -0.012 grad norm 0.400 tokens/s 12,345 staleness 0.50 "
        "seconds 4.0 eval 0.500 "
    )
    early = log_of(tmp_path / "early", 100, [STEP] * 8)
    assert early[-1].startswith("  8/100 steps")
    (warm_start,) = log_of(tmp_path, 60, [STEP] * 60, is_main=False)
    assert warm_start.startswith("60/60 steps")


def test_a_phase_is_printed_once_and_a_later_step_two_seconds_after_the_last(tmp_path):
    screen, printed = Screen(RunFolder(tmp_path), 100), []
    for number, doing in ((0, "loading: 1 of 2"), (1, "loading: 1 of 2"), (0, "loading: 2 of 2")):
        screen.view.statuses = {f"trainer.rank{number}": ProcessStatus(doing, 0.0, 1)}
        printed += [line.partition(" ")[2] for line in screen.lines(0.0, last=False)]
    assert printed == ["trainer.rank0: loading: 1 of 2"]
    screen.view.started, printed = 0.0, []
    for step, now in enumerate((0.0, 0.0, 0.0, 0.0, 0.0, 1.9, 2.0, 3.9, 4.0)):
        screen.view.add({"step": step, "time": now})
        printed += [line.split("/")[0].strip() for line in screen.lines(now, last=False)]
    assert printed == ["1", "2", "3", "4", "5", "7", "9"]


def test_a_resumed_run_starts_at_its_checkpoint_not_at_the_steps_it_repeats(tmp_path):
    metrics, terminal, output = MetricsFile(RunFolder(tmp_path)), Terminal(), io.StringIO()
    for step in range(13):
        metrics.append(step, STEP)
    time.sleep(0.01)
    with Screen(RunFolder(tmp_path), 60, on_terminal(terminal), num_saved=10):
        assert " 10 of 60 steps" in terminal.getvalue()
        with Screen(RunFolder(tmp_path), 60, Console(file=output)) as screen:
            screen.update()
            metrics.truncate_after(9)  # by the trainer, half a minute later
            metrics.append(10, STEP)
    assert " 13 of 60 steps" not in terminal.getvalue()
    assert " 11 of 60 steps" in terminal.getvalue()
    assert [line.split()[0] for line in output.getvalue().splitlines()] == ["11/60"]


def test_damaged_files_are_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('nonsense\n{"step": 0, "train/reward": "x"}\n[]\n{"st')
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "trainer.json").write_text("{")
    for console in (on_terminal(Terminal()), Console(file=io.StringIO())):
        with Screen(RunFolder(tmp_path), 10, console) as screen:
            screen.update()


def test_a_closed_terminal_turns_the_screen_off_and_does_not_end_the_run(tmp_path, caplog):
    class Gone(Terminal):
        def write(self, text):
            raise OSError("gone")

    with Screen(RunFolder(tmp_path), 10, on_terminal(Gone())) as screen:
        screen.update()
        screen.update()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_final_summary_has_the_results_and_the_command_that_resumes(tmp_path):
    folder = tmp_path / "my-run"
    assert "0 steps" in final_summary(RunFolder(folder))
    metrics = MetricsFile(RunFolder(folder))
    passed = {f"eval/pass@{k}": k / 10 for k in (1, 2, 3, 4)}
    for step in range(24):
        row = {**STEP, **passed, "train/reward": step / 20, "eval/reward": 2.0 - step / 10}
        metrics.append(step, row)
    for name in ("step_000010", "step_000020"):
        (folder / "checkpoints" / name / "hf").mkdir(parents=True)
    (folder / "overrides.yaml").write_text(json.dumps({"overrides": ["loss=grpo", "resume=true"]}))
    text = final_summary(RunFolder(folder))
    for shown in (
        "0.100 (first 5) -> 0.925 (last 10), best 1.150 in rollouts/step_000023.jsonl",
        "\neval/pass@3  0.300 -> 0.300\ntime ",  # the fourth evaluated metric is the last one
        *("step_000020/hf", "\ngo on        python train.py loss=grpo run_name=my-run resume=true"),
    ):
        assert shown in text
    (folder / "checkpoints").rename(folder / "elsewhere")  # no checkpoint is left
    assert "\nagain        python train.py" in final_summary(RunFolder(folder))
    for config, ended in (("max_steps: 24", True), ("max_steps: many", False),
                          ("max_steps: 25", False),
                          ("{max_steps: 99, stop_when: eval/reward < -0.2}", True)):  # fmt: skip
        (folder / "config.yaml").write_text(config)
        assert ("resume=true" in final_summary(RunFolder(folder))) != ended


def test_the_first_and_the_last_steps_of_a_short_run_are_different_ones(tmp_path):
    for rewards, shown in (
        ([0.2], "reward  0.200, best"),
        ([0.2, 0.4], "reward  0.200 (first 1) -> 0.400 (last 1), best"),
        ([0.1, 0.3, 0.9, 0.5, 0.7], "reward  0.200 (first 2) -> 0.600 (last 2), best"),
    ):
        folder = tmp_path / str(len(rewards))
        log_of(folder, rows=[{"train/reward": reward} for reward in rewards])
        assert shown in final_summary(RunFolder(folder))


def test_the_summary_of_a_run_leaves_out_the_rewards_of_single_turns(tmp_path):
    own = {"eval/reward/a": 0.5, "eval/reward/a/turn_0": 0.25, "eval/reward/turn_b": 0.75}
    log_of(tmp_path, rows=[{**STEP, **own}])
    words = final_summary(RunFolder(tmp_path)).split()
    assert [word for word in words if word.startswith("eval/")] == [*own][::2]


@pytest.mark.parametrize("console", [on_terminal(Terminal()), Console(file=io.StringIO())])
def test_a_warning_of_another_process_is_shown_once_and_is_in_its_log(console, tmp_path, capsys):
    log, run_folder = logging.getLogger("my_env"), RunFolder(tmp_path)
    with Screen(run_folder, 10, console) as screen, noting_warnings(run_folder, "rollouts"):
        for _ in range(2):
            log.warning("the judge is [bold]slow\x07")
            log.info("not a warning")
            screen.update()
        library = {"pathname": "/site-packages/x.py", "levelno": logging.WARNING}
        log.handle(logging.makeLogRecord({**library, "msg": "warning of a library"}))
        for number in range(25):  # 20 warnings of a process are shown
            log.warning("warning %d", number)
    shown = console.file.getvalue()
    assert shown.count("rollouts: the judge is [bold]slow") == 1
    assert "\x07" not in shown
    assert "not a warning" not in shown
    assert [f"rollouts: warning {number}" in shown for number in (18, 19)] == [True, False]
    assert "rollouts: warning of" not in shown
    if not console.is_terminal:  # the live display captures stderr
        assert capsys.readouterr().err.count("the judge is") == 2


def test_the_remaining_time_follows_the_speed_of_this_start_alone(monkeypatch):
    monkeypatch.setattr("rl.terminal.progress.time.time", lambda: 1000.0)
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    progress = Progress(console, 100, "rollouts", done=60)  # of an earlier start
    progress.advance(10)
    console.print(progress.picture(now=1010.0))
    assert "10 s, about 30 s left" in console.file.getvalue()
    assert "70/100 rollouts" in console.file.getvalue()


def test_a_log_file_gets_a_line_for_each_tenth_and_every_note():
    with Progress(Console(file=io.StringIO()), 40, "calls", done=8) as progress:
        for number in range(9, 18):
            mean = "mean 0.5" if number == 12 else None
            progress.advance(1, mean, "" if number % 9 else "failed")
    lines = progress.console.file.getvalue().splitlines()
    assert lines == ["failed", "12 of 40 calls, mean 0.5", "16 of 40 calls, mean 0.5"]


def test_a_repeated_step_replaces_the_steps_after_it():
    view = RunView("run", 100)
    for step in range(30):
        view.add({"step": step, "time": 900.0 + step, "train/reward": 0.25})
    view.add({"step": 10, "time": 950.0, "train/reward": 0.5})
    assert view.done == 11
    assert list(view.rewards) == list(range(11))
    assert [row["step"] for row in view.rows][-1] == 10


def test_a_panel_needs_no_metric_and_highlights_a_slow_phase():
    statuses = {
        "inference0": ProcessStatus("serving", 100.0, 1),
        "inference1": ProcessStatus("starting vLLM", 970.0, 2),
        "trainer.rank0": ProcessStatus("training step 4: 2 of 4", 990.0, 3),
        "trainer.rank1": ProcessStatus("training step 4: 1 of 4", 969.0, 4),
    }
    view = RunView("run", 10, started=0.0, statuses=statuses)
    view.add({"step": 0})
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(live_panel(view, 1000.0))
    slow = [line for line in console.file.getvalue().splitlines() if "\x1b[33m" in line]
    assert ["trainer x2" in line and "31 s" in line for line in slow] == [True]


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
