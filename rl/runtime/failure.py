"""The error that ended a process, as one message for the user.

The traceback goes to the log of the process. The message goes to <run>/failures/, where the
supervisor finds it and shows the first one. The message of a user's error has no class name.
"""

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from envs.user_code import place_of
from rl.runtime.files import write_whole
from rl.runtime.folder import RunFolder
from rl.runtime.text import strip_escapes


class RunFailed(RuntimeError):
    """The run cannot continue; the message is for the user."""


class OutOfTime(RunFailed):
    """The run has reached its max_time, saved a checkpoint and ended; this is not a failure."""


def message_of(error: BaseException) -> str:
    """Return the message of an error for the user."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # a task group wraps even a single error
    if isinstance(error, ValueError | RunFailed):
        return strip_escapes(str(error))
    return strip_escapes(f"{type(error).__name__}: {error}{place_of(error)}")


@contextmanager
def reporting(run_folder: RunFolder, process: str) -> Iterator[None]:
    """Turn an error of the block into a failure report and exit status 1."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 the outermost frame of a process
        traceback.print_exc()
        report_failure(run_folder, process, error)
        sys.exit(1)


def report_failure(run_folder: RunFolder, process: str, error: BaseException) -> None:
    """Write why a process cannot continue, unless it has reported an error before."""
    path = run_folder.failures / f"{process}.json"
    if path.exists():
        return
    report = {"part": process, "time": time.time(), "message": message_of(error)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(report))


def first_failure(run_folder: RunFolder, of: str = "") -> dict[str, str] | None:
    """Return the oldest report {part, time, message} of processes whose names start with `of`."""
    reports = [json.loads(path.read_text()) for path in run_folder.failures.glob(f"{of}*.json")]
    return min(reports, key=lambda report: report["time"], default=None)
