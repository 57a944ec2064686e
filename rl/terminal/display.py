"""Show live output: redraw a picture on a terminal, or append lines to a log file."""

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
    `update` regularly. An error in `update` is logged and turns the display off. It is not raised.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Live | None = None  # None if the output is not a terminal
        self._is_on = False
        self._drawn = 0  # unix time of the latest picture, in whole seconds

    def read(self) -> None:
        """Read new data. `update` calls this method before each output."""

    def picture(self, now: float) -> RenderableType:
        """Return the picture for a terminal. `now` is the time in unix seconds."""
        raise NotImplementedError

    def lines(self, now: float, *, last: bool) -> Iterable[str]:
        """Return new lines for a log file. `now`: unix seconds; `last`: whether the block ended."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        # isatty() is checked too, because with FORCE_COLOR rich treats any file as a terminal.
        console = self.console
        if console.is_terminal and not console.is_dumb_terminal and console.file.isatty():
            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        self._is_on = True
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        self.update(last=True)
        self._is_on = False

    def update(self, *, last: bool = False) -> None:
        """Read new data and show them. This method never raises an error."""
        if not self._is_on:
            return
        try:
            self.read()
            self._show(time.time(), last)
        except Exception as error:  # noqa: BLE001 (a closed terminal must not end the run)
            log.warning("the display is off after %s: %s", type(error).__name__, error)
            self._is_on = False
            with contextlib.suppress(Exception):
                self._close()

    def note(self, line: str, style: str = "") -> None:
        """Print one line. On a terminal, the line appears above the picture."""
        if self._live:
            self.console.print(Text(line, style))
        else:
            self._print(line)

    def _show(self, now: float, last: bool) -> None:
        if self._live is None:
            for line in self.lines(now, last=last):
                self._print(line)
            return
        if int(now) != self._drawn or last:  # draw once a second, because each picture takes time
            self._drawn = int(now)
            self._live.start()  # only the first call has an effect
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
