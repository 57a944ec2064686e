"""A search on the screen: calls of its budget, the best score so far, how many candidates."""

from typing import Self

from rich import progress as rich_progress
from rich.console import Console

_LINES = 10  # of progress, where there is no terminal, beside one for each candidate


class Progress:
    """A context manager: a bar on a terminal, a few lines in a log file."""

    def __init__(self, console: Console, max_calls: int) -> None:
        self._console, self._max = console, max_calls
        self._calls, self._round, self._printed = 0, 0, 0
        self._scores: list[float] = []  # of the candidates, on the validation examples
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("calls"),
            rich_progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("prompt 0", total=max_calls)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def calls(self) -> int:
        """Rollouts so far, remembered ones included."""
        return self._calls

    def call(self) -> None:
        """One more rollout is there."""
        self._calls += 1
        self._show()
        share = self._calls * _LINES // self._max
        if not self._console.is_terminal and share > self._printed:
            self._printed = share
            self._say()

    def round(self, number: int) -> None:
        """Another round begins."""
        self._round = number
        self._show()

    def candidate(self, score: float) -> None:
        """One more prompt was played on all validation examples."""
        is_best = not self._scores or score > max(self._scores)
        self._scores.append(score)
        self._show()
        what = "start" if len(self._scores) == 1 else f"candidate {len(self._scores) - 1}"
        better = ", the best so far" if is_best and len(self._scores) > 1 else ""
        self._console.print(
            f"{what}: validation score {score:.3f}{better} ({self._calls} calls)", highlight=False
        )

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._calls, description=self._text())

    def _say(self) -> None:
        self._console.print(
            f"{self._calls} of {self._max} calls, {self._text()}", highlight=False, soft_wrap=True
        )

    def _text(self) -> str:
        if not self._scores:
            return "playing the first prompt"
        candidates = f"{len(self._scores)} candidate" + "s" * (len(self._scores) > 1)
        best = f"best {max(self._scores):.3f} (start {self._scores[0]:.3f})"
        return f"{best}, {candidates}, round {self._round}"
