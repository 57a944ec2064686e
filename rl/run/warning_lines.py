"""Warnings of every process of a run, one file per process: on the screen as well as in the log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl.run.failure import printable
from rl.run.folder import RunFolder

_MOST = 20  # lines of one process; what is said more often is in its log


class _File(logging.Handler):
    def __init__(self, run_folder: RunFolder, part: str) -> None:
        super().__init__(logging.WARNING)
        self._path, self._lines = run_folder.warnings / f"{part}.log", set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning of ours or of the user's code; libraries warn of too much."""
        line = printable(record.getMessage()).split("\n")[0]
        if "site-packages" in record.pathname or line in self._lines or len(self._lines) >= _MOST:
            return
        self._lines.add(line)
        with suppress(OSError):  # a full disk must stop the run where data is written
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{line}\n")


def note_warning(run_folder: RunFolder, part: str, line: str) -> None:
    """Have a line about a part on the screen; by a process that logs nothing itself."""
    with suppress(OSError):
        run_folder.warnings.mkdir(parents=True, exist_ok=True)
        with (run_folder.warnings / f"{part}.log").open("a") as file:
            file.write(f"{printable(line)}\n")


@contextmanager
def noting_warnings(run_folder: RunFolder, part: str) -> Iterator[None]:
    """Have the warnings of this process in its log and on the screen while the block lasts."""
    handlers = [logging.StreamHandler(), _File(run_folder, part)]
    handlers[0].setLevel(logging.WARNING)
    root = logging.getLogger()
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)


class WarningTail:
    """Reads what processes warn of as they do."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self._num_read: dict[str, int] = {}

    def read(self) -> list[str]:
        """The complete lines since the last call, `part: warning`."""
        fresh = []
        for path in sorted(self._run_folder.warnings.glob("*.log")):
            with suppress(OSError):
                lines = path.read_text(errors="replace").split("\n")[:-1]
                start = self._num_read.get(path.stem, 0)
                fresh += [f"{path.stem}: {printable(line)}" for line in lines[start:]]
                self._num_read[path.stem] = len(lines)
        return fresh
