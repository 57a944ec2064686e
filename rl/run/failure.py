"""How a part of the run says, in one message, why it cannot go on.

The traceback goes to the part's own log; the message goes to <run>/failures/, where the
supervisor finds it and shows the first one. An error of the user's making is said without a class
name.
"""

import json
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.run.folder import RunFolder
from rl.run.whole_files import write_whole

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, titles
_STDLIB = sysconfig.get_path("stdlib")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


class RunFailed(RuntimeError):
    """The run cannot go on; the message is for the user."""


class OutOfTime(RunFailed):
    """The run has saved what it has and ended, for its max_time is over: not a failure."""


def printable(text: str) -> str:
    """The text without what would command a terminal: it may be a server's, or a policy's."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def message_of(error: BaseException) -> str:
    """What an error says to the user."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # a task group wraps even a single error
    if isinstance(error, ValueError | RunFailed):
        return printable(str(error))
    return printable(f"{type(error).__name__}: {error}{_place(error)}")


def _place(error: BaseException) -> str:
    """The innermost line that is no library's: the user's own, where their code raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_ours(frame)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(("<", _STDLIB)) and "site-packages" not in frame.filename


@contextmanager
def reporting(run_folder: RunFolder, part: str) -> Iterator[None]:
    """Turn whatever escapes from the block into a failure report and exit status 1."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 the outermost frame of a process
        traceback.print_exc()
        report_failure(run_folder, part, error)
        sys.exit(1)


def report_failure(run_folder: RunFolder, part: str, error: BaseException) -> None:
    """Say why a part cannot go on; the first report of a part stands."""
    path = run_folder.failures / f"{part}.json"
    if path.exists():
        return
    report = {"part": part, "time": time.time(), "message": message_of(error)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(report))


def first_failure(run_folder: RunFolder, of: str = "") -> dict[str, str] | None:
    """Return the oldest report of the parts whose names begin so: {part, time, message}."""
    reports = [json.loads(path.read_text()) for path in run_folder.failures.glob(f"{of}*.json")]
    return min(reports, key=lambda report: report["time"], default=None)
