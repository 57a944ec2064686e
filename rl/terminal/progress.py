"""Show how many items are done: a progress bar on a terminal, or at most ten log lines."""

import time

from rich.console import Console, RenderableType

from rl.terminal.display import Display
from rl.terminal.panel import elapsed_and_left, heading

_LINES = 10  # a log file gets one line per tenth of the items


class Progress(Display):
    """A display of how many of `total` items are done. `noun`: plural noun for the items."""

    def __init__(self, console: Console, total: int, noun: str, *, done: int = 0) -> None:
        super().__init__(console)
        self.done, self._done_before, self._total, self._noun = done, done, total, noun
        self._text, self._notes, self._started = "", list[str](), time.time()
        self._printed_tenths = self._tenths_done()

    def advance(self, count: int = 0, text: str | None = None, note: str = "") -> None:
        """Add `count` finished items, print `note`, and show a new `text` (None: the old one)."""
        self.done += count
        self._text = self._text if text is None else text
        self._notes += [note] if note else []
        self.update()

    def read(self) -> None:
        while self._notes:
            self.note(self._notes.pop(0))

    def picture(self, now: float) -> RenderableType:
        elapsed, new = now - self._started, self.done - self._done_before
        left = elapsed / new * (self._total - self.done) if new else None
        count = f"{self.done}/{self._total} {self._noun}"
        return heading(self._text, elapsed_and_left(elapsed, left), self.done, self._total, count)

    def lines(self, now: float, *, last: bool) -> list[str]:  # noqa: ARG002
        if self._tenths_done() <= self._printed_tenths:
            return []
        self._printed_tenths = self._tenths_done()
        return [", ".join(filter(None, [f"{self.done} of {self._total} {self._noun}", self._text]))]

    def _tenths_done(self) -> int:
        return self.done * _LINES // max(self._total, 1)
