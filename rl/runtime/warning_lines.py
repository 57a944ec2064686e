"""Warning files: each process has one, and the supervisor shows the warnings in the terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl.runtime.files import LineTail
from rl.runtime.folder import RunFolder
from rl.runtime.text import printable

_LIMIT = 20  # maximum number of shown warnings per process; the log contains all warnings


class _WarningFile(logging.Handler):
    def __init__(self, run_folder: RunFolder, process: str) -> None:
        super().__init__(logging.WARNING)
        self._run_folder, self._process = run_folder, process
        self._lines = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write each warning of our or the user's code once. Skip the warnings of libraries."""
        line = printable(record.getMessage()).split("\n")[0]
        if "site-packages" in record.pathname or line in self._lines or len(self._lines) >= _LIMIT:
            return
        self._lines.add(line)
        note_warning(self._run_folder, self._process, line)


def note_warning(run_folder: RunFolder, process: str, line: str) -> None:
    """Append a warning of a process to its warning file. The supervisor shows the new lines."""
    with suppress(OSError):  # the process that writes rollouts or metrics reports a full disk
        run_folder.warnings.mkdir(parents=True, exist_ok=True)
        with (run_folder.warnings / f"{process}.log").open("a") as file:
            file.write(f"{printable(line)}\n")


@contextmanager
def noting_warnings(run_folder: RunFolder, process: str) -> Iterator[None]:
    """Copy the warnings of this process to its log and its warning file while the block runs."""
    handlers = [logging.StreamHandler(), _WarningFile(run_folder, process)]
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
    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self._tails: dict[str, LineTail] = {}  # process name -> reader of its file

    def read(self) -> list[str]:
        """Return the warnings added since the last call, as `process: warning`."""
        new = []
        for path in sorted(self._run_folder.warnings.glob("*.log")):
            tail = self._tails.setdefault(path.stem, LineTail(path))
            with suppress(OSError):  # an unreadable warning file must not end the run
                lines = [line.decode(errors="replace") for line in tail.read()]
                new += [f"{path.stem}: {printable(line)}" for line in lines]
        return new
