"""Skip, start or resume one job of a sweep, and record the job's result.

A job is identified by its overrides, not by its number. A resumed sweep therefore recognises
its finished jobs even if their order, the number of seeds or the launcher has changed.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lab.sweeps.overview import read_jobs
from lab.sweeps.process import end_with_process, redirect_output_to
from lab.sweeps.slots import Slot, hold_slot
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.status import STOPPED
from rl.runtime.stop_request import Stopped
from rl.runtime.sweep_folder import (
    DID_NOT_END,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    JobRecord,
    SweepFolder,
)
from rl.runtime.text import printable, say

StartRun = Callable[[str, bool], float | None]  # run name, whether to resume -> result


def run_job(
    sweep: SweepFolder,
    overrides: list[str],
    *,
    output_dir: Path,
    run_name: str,
    max_steps: int,
    start: StartRun,
) -> float | None:
    """Run a job unless it is finished. Return its result, which a sweeper such as Optuna maximises.

    A new run is named `<run_name>-<number of the job>`. `start` starts or resumes the run. If
    `start` raises SystemExit, other than Stopped, this function raises RunFailed.
    """
    number, record = sweep.claim(overrides)
    record.run_name = name = record.run_name or f"{run_name}-{number}"
    folder = (output_dir / name).absolute()
    record.folder = str(folder)
    if is_done(record, max_steps):
        return record.result
    info = sweep.read_info()
    process, slots = info["process"], [Slot(**slot) for slot in info["slots"]]
    in_sweeps_process = process["pid"] == os.getpid()
    stopped: Stopped | None = None
    with ExitStack() as stack:
        if not in_sweeps_process:
            end_with_process(**process)
            stack.enter_context(redirect_output_to(sweep.log_of(number)))
        stack.enter_context(hold_slot(slots))
        record.state, record.error, record.max_steps = RUNNING, DID_NOT_END, max_steps
        record.started, record.ended = time.time(), None
        sweep.write(number, record)
        if in_sweeps_process:
            say(f"\n{read_jobs(sweep).line_of(number)}")
        try:
            record.result = start(name, RunFolder(folder).has_results())
        except BaseException as error:
            is_resumable = isinstance(_cause_of(error), Stopped | OutOfTime | KeyboardInterrupt)
            record.state, record.error = WAITING if is_resumable else FAILED, _message_of(error)
            if not in_sweeps_process and isinstance(error, Stopped):
                stopped = error
            elif isinstance(error, SystemExit) and not isinstance(error, Stopped):
                # SystemExit would end this process, and the other jobs would not run.
                raise RunFailed(record.error) from error
            else:
                raise
        else:
            record.state, record.error = DONE, None
        finally:
            record.ended = time.time()
            sweep.write(number, record)
    if stopped:
        stopped.raise_signal_again()  # submitit's handler requeues the job and ends this process
        raise RunFailed(str(record.error)) from stopped
    return record.result


def is_done(record: JobRecord, max_steps: int) -> bool:
    if record.state != DONE or record.folder is None:
        return False
    folder = RunFolder(Path(record.folder))
    steps = folder.read_yaml(folder.config).get("max_steps")
    return isinstance(steps, int) and steps >= max_steps


def _cause_of(error: BaseException) -> BaseException:
    return error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error


def _message_of(error: BaseException) -> str:
    cause = _cause_of(error)
    if isinstance(cause, SystemExit):
        return f"ended with status {cause.code}" if cause.code else STOPPED
    if isinstance(cause, KeyboardInterrupt):
        return "interrupted"
    lines = printable(str(cause)).strip().splitlines()
    return lines[0].removeprefix("- ") if lines else type(cause).__name__
