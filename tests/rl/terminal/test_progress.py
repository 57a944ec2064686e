"""The progress bar of programs that play a known number of rollouts."""

import io

from rich.console import Console

from rl.terminal.progress import Progress


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
            progress.advance(
                1, "mean 0.5" if number == 12 else None, "" if number % 9 else "failed"
            )
    lines = progress.console.file.getvalue().splitlines()
    assert lines == ["failed", "12 of 40 calls, mean 0.5", "16 of 40 calls, mean 0.5"]
