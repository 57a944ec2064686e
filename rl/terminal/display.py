"""Live output: a picture that is redrawn in place on a terminal, or lines in a log file.

The screen of a run and the progress bars are subclasses of Display.
"""

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

log = logging.getLogger(__name__)


class Display:
    """A context manager that shows live output while its block runs.

    A subclass defines `picture` for a terminal and `lines` for any other output. The block calls
    `update` regularly. The first error is logged and turns the display off; the block continues.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Live | None = None  # None if the output is not a terminal
        self._is_on = False
        self._drawn: object = None

    def read(self) -> None:
        """Read new data. `update` calls this method before each output."""

    def state(self) -> object:
        """Return the data that the picture shows. The picture is redrawn when the data change."""

    def picture(self, now: float) -> RenderableType:
        """Return the picture at `now` (unix seconds)."""
        raise NotImplementedError

    def lines(self, now: float, *, last: bool) -> Iterable[str]:
        """Return the lines to print at `now` (unix seconds); `last` marks the end of the block."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if is_terminal(self.console):
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        self._is_on = True
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        self.update(last=True)
        self._is_on = False

    def update(self, *, last: bool = False) -> None:
        """Read new data and show it. This method is cheap and raises no error."""
        if not self._is_on:
            return
        try:
            self.read()
            self._show(time.time(), last)
        except Exception as error:  # noqa: BLE001 (a closed terminal must not end the run)
            log.warning("the screen is off after an error: %s: %s", type(error).__name__, error)
            self._is_on = False
            with contextlib.suppress(Exception):
                self._close()

    def note(self, line: str, style: str = "") -> None:
        """Print one line, above the picture if there is a picture."""
        if self._live:
            self.console.print(Text(line, style))
        else:
            self._print(line)

    def _show(self, now: float, last: bool) -> None:
        if self._live is None:
            for line in self.lines(now, last=last):
                self._print(line)
            return
        state = (self.state(), int(now))
        if state != self._drawn:
            self._drawn = state
            self._live.start()  # `start` has an effect only in its first call
            self._live.update(self.picture(now), refresh=True)
        if last:
            self._close()

    def _close(self) -> None:
        if self._live:
            self._live.stop()
            self.console.print()

    def _print(self, line: str) -> None:
        self.console.file.write(line + "\n")
        self.console.file.flush()


def is_terminal(console: Console) -> bool:
    """Return whether the console is a terminal that can redraw a picture in place."""
    # With FORCE_COLOR, rich treats any file as a terminal, so check the output file itself.
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
