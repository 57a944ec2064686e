"""One job of a sweep: done before, taken up where it broke off, or begun, and noted in any case.

the sweep's own process                      processes of a launcher, where there are any
SweepStart: folder, jobs, slots, screen ---> run_job: record, slot, log, the run itself
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml

from rl.config.resume_rules import has_steps
from rl.run.failure import OutOfTime, RunFailed, printable
from rl.run.folder import RunFolder
from rl.run.status import STOPPED
from rl.run.stop_request import Stopped
from rl.run.sweep_folder import (
    DID_NOT_END,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    JobRecord,
    SweepFolder,
)
from rl.sweeps.overview import announce
from rl.sweeps.process import end_with, output_to
from rl.sweeps.slots import Slot, slot_of

Start = Callable[[str, bool], float | None]  # the run's name, and whether it goes on


def run_job(
    sweep: SweepFolder,
    overrides: list[str],
    *,
    output_dir: Path,
    run_name: str,
    max_steps: int,
    start: Start,
) -> float | None:
    """Do a job, unless it is done; return what the sweeper maximises.

    Args:
        sweep: that it belongs to.
        overrides: what the job is known by.
        output_dir: where its run's folder lies.
        run_name: of its run, where it has none yet; the job's number is added.
        max_steps: of its run.
        start: does the run.

    Raises:
        RunFailed: and whatever else `start` raises, which in a launcher's process is a RunFailed.

    """
    number, record = sweep.claim(overrides)
    record.run_name = name = record.run_name or f"{run_name}-{number}"
    folder = (output_dir / name).absolute()
    record.folder = str(folder)
    if is_done(record, max_steps):
        return record.result
    info = sweep.read_info()
    process, slots = info["process"], [Slot(**slot) for slot in info["slots"]]
    is_alone = process["pid"] == os.getpid()
    stopped: Stopped | None = None
    with ExitStack() as stack:
        if not is_alone:
            end_with(**process)
            stack.enter_context(output_to(sweep.log_of(number)))
        stack.enter_context(slot_of(slots))
        record.state, record.error, record.max_steps = RUNNING, DID_NOT_END, max_steps
        record.started, record.ended = time.time(), None
        sweep.write(number, record)
        if is_alone:
            announce(sweep, number)
        try:
            record.result = start(name, has_steps(folder))
        except BaseException as error:
            goes_on = isinstance(_cause(error), Stopped | OutOfTime | KeyboardInterrupt)
            record.state, record.error = WAITING if goes_on else FAILED, _sentence(error)
            if not is_alone and isinstance(error, Stopped):
                stopped = error
            elif not is_alone and isinstance(error, SystemExit):
                raise RunFailed(record.error) from error  # the other jobs go on
            else:
                raise
        else:
            record.state, record.error = DONE, None
        finally:
            record.ended = time.time()
            sweep.write(number, record)
    if stopped:
        stopped.hand_on()  # a launcher that queues it again ends this process here
        raise RunFailed(str(record.error)) from stopped
    return record.result


def is_done(record: JobRecord, max_steps: int) -> bool:
    """True where the job's run has come to its end and is still there; a longer one has not."""
    if record.state != DONE or record.folder is None:
        return False
    try:
        done = yaml.safe_load(RunFolder(Path(record.folder)).config.read_text())
        return done["max_steps"] >= max_steps
    except (OSError, yaml.YAMLError, TypeError, KeyError):  # gone, or no configuration any more
        return False


def _cause(error: BaseException) -> BaseException:
    """What a program ended by."""
    return error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error


def _sentence(error: BaseException) -> str:
    """The first line of what was said, or of what it was."""
    cause = _cause(error)
    if isinstance(cause, SystemExit):
        return f"ended with status {cause.code}" if cause.code else STOPPED
    if isinstance(cause, KeyboardInterrupt):
        return "interrupted"
    lines = printable(str(cause)).strip().splitlines()
    return lines[0].removeprefix("- ") if lines else type(cause).__name__
