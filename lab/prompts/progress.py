"""The progress of a prompt search on the terminal: calls, best score, number of candidates."""

import time

from rich.console import Console, RenderableType

from rl.terminal.display import Display
from rl.terminal.panel import heading, times

_LINES = 10  # of progress in a log file, besides one line per candidate


class Progress(Display):
    """A bar on a terminal, a few lines in a log file."""

    def __init__(self, console: Console, max_calls: int) -> None:
        super().__init__(console)
        self.calls = 0  # rollouts so far, including those of an earlier start
        self._max, self._round, self._printed = max_calls, 0, 0
        self._scores: list[float] = []  # of the candidates, on the validation examples
        self._notes: list[str] = []
        self._started = time.time()

    def call(self) -> None:
        """Count one rollout."""
        self.calls += 1
        self.update()

    def round(self, number: int) -> None:
        """Show the number of the round."""
        self._round = number
        self.update()

    def candidate(self, score: float) -> None:
        """Add the mean score of a new prompt on all validation examples."""
        is_best = not self._scores or score > max(self._scores)
        self._scores.append(score)
        what = "start" if len(self._scores) == 1 else f"candidate {len(self._scores) - 1}"
        better = ", the best so far" if is_best and len(self._scores) > 1 else ""
        self._notes.append(f"{what}: validation score {score:.3f}{better} ({self.calls} calls)")
        self.update()

    def read(self) -> None:
        """Print one line per new candidate."""
        notes, self._notes = self._notes, []
        for line in notes:
            self.note(line)

    def state(self) -> object:
        """Return what the bar depends on."""
        return self.calls, self._round, len(self._scores)

    def picture(self, now: float) -> RenderableType:
        """Return the bar."""
        elapsed = now - self._started
        left = elapsed / self.calls * (self._max - self.calls) if self.calls else None
        count = f"{self.calls}/{self._max} calls"
        return heading(self._text(), times(elapsed, left), self.calls, self._max, count)

    def lines(self, now: float, *, last: bool) -> list[str]:  # noqa: ARG002
        """Return a line after each tenth of the budget."""
        share = self.calls * _LINES // self._max
        if share <= self._printed:
            return []
        self._printed = share
        return [f"{self.calls} of {self._max} calls, {self._text()}"]

    def _text(self) -> str:
        if not self._scores:
            return "playing the first prompt"
        candidates = f"{len(self._scores)} candidate" + "s" * (len(self._scores) > 1)
        best = f"best {max(self._scores):.3f} (start {self._scores[0]:.3f})"
        return f"{best}, {candidates}, round {self._round}"
