"""The screen of a run on a terminal and in a log file, and the summary at its end."""

import io
import json
import logging
import time

import pytest
from rich.console import Console

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.runtime.status import Status
from rl.runtime.warning_lines import noting_warnings
from rl.terminal.screen import Screen, final_summary

# A line of metrics.jsonl as a run writes it.
STEP = {
    "train/reward": 0.25,
    "train/loss": -0.0123,
    "train/entropy": 1.5,
    "train/grad_norm": 0.4,
    "train/learning_rate": 3e-4,
    "train/tokens": 1000,
    "rollout/tokens_per_s": 12345.0,
    "rollout/mean_length": 9.31,
    "rollout/truncated": 0.004,
    "staleness/mean": 0.5,
    "staleness/max": 1,
    "mismatch/mean_abs": 0.00123,
    "mismatch/max_abs": 0.03,
    "time/wait": 1.0,
    "time/update": 3.0,
    "time/step": 4.0,
}


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


@pytest.mark.parametrize("console", [on_terminal(Terminal()), Console(file=io.StringIO())])
def test_a_warning_of_another_process_is_shown_once(console, tmp_path):
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
    assert not [text for text in ("\x07", "not a warning", "rollouts: warning of") if text in shown]
    assert [f"rollouts: warning {number}" in shown for number in (18, 19)] == [True, False]
