"""Failure reports: the error that ended a process, as one message for the user.

The traceback is in the log of the process. The message is in <run>/failures/, and the supervisor
shows the oldest message. Messages of ValueError and RunFailed omit the class name.
"""

import json
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter

from envs.user_code import format_location
from rl.runtime.files import write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.given_files import load_json
from rl.runtime.text import OUT_OF_MEMORY, printable

_REMEDIES = {  # pattern in an error's message -> what the user can do
    OUT_OF_MEMORY: "lower trainer.tokens_per_micro_batch or trainer.logprob_chunk, or set "
    "trainer.gradient_checkpointing=true; for vLLM, lower inference.cpu_kv_cache_gib on a CPU or "
    "inference.args.gpu_memory_utilization on a GPU (docs/troubleshooting.md, memory)",
    "Too many open files": "raise the hard limit, ulimit -Hn, or lower sampler.max_concurrent "
    "(docs/troubleshooting.md, open files)",
    "(?i)address already in use": "start again, because another program has taken the port",
}


class RunFailed(RuntimeError):
    """The error raised if a run cannot continue. The message is for the user."""


def refuse_breakpoint(*_: object, **__: object) -> None:
    """Raise RunFailed instead of starting pdb, because this process has no terminal."""
    raise RunFailed(
        "breakpoint() needs a terminal, but this process writes to a log: set trainer.debug=true, "
        "which runs the trainer, but not the environments, in the terminal"
    )


class OutOfTime(RunFailed):
    """The error raised after a run has saved a checkpoint and ended because of max_time."""


def message_of(error: BaseException) -> str:
    """Return the text that the user sees for an error, without terminal escapes."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # a TaskGroup wraps even a single error
    if isinstance(error, ValueError | RunFailed):
        return printable(str(error)) or type(error).__name__
    return with_remedies(printable(f"{type(error).__name__}: {error}{format_location(error)}"))


def with_remedies(text: str) -> str:
    """Return `text` (an error or the end of a log), followed by remedies for known errors in it."""
    remedies = (remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, text))
    return "\n".join([text, *remedies])


@contextmanager
def reporting_failures(run_folder: RunFolder, process: str) -> Iterator[None]:
    """If the block raises an error, write a failure report and exit with status 1."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 the outermost frame of a process
        traceback.print_exc()
        report_failure(run_folder, process, error)
        sys.exit(1)


def report_failure(run_folder: RunFolder, process: str, error: BaseException) -> None:
    path = run_folder.failures / f"{process}.json"
    if path.exists():
        return
    report = {"part": process, "time": time.time(), "message": message_of(error)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(report))


def first_failure(run_folder: RunFolder, prefix: str = "") -> dict[str, str] | None:
    """Return the oldest report of the processes whose names begin with `prefix`, or None."""
    reports: list[tuple[float, dict[str, str]]] = []
    for path in sorted(run_folder.failures.glob(f"{prefix}*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            report = load_json(run_folder.read(path))
            texts = {key: printable(str(report[key])) for key in ("part", "message")}
            reports.append((float(report["time"]), texts))
    return min(reports, key=itemgetter(0))[1] if reports else None
