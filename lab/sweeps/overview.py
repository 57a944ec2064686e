"""Print the state of a sweep at its start, when a job's state changes, and at its end.

A sequential job prints the line with its state before its run starts. The output of parallel jobs
goes to their logs, so a thread of the sweep's process prints their lines.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from threading import Event, Thread

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import num_steps_done
from rl.runtime.sweep_folder import DONE, FAILED, RUNNING, WAITING, JobRecord, SweepFolder, labels
from rl.runtime.text import relative_path, say
from rl.terminal.panel import format_time

_TICK_S = 0.5
_PROGRESS_EVERY_S = 60.0


@dataclass(frozen=True)
class RecordedJobs:
    records: dict[int, JobRecord]
    started: float  # Unix time of the sweep's latest start
    num_slots: int = 1  # number of jobs that run in parallel

    @cached_property
    def labels(self) -> dict[int, str]:
        names = labels([record.overrides for record in self.records.values()])
        return dict(zip(self.records, names, strict=True))

    @cached_property
    def num_by_state(self) -> Counter[str]:
        return Counter(record.state for record in self.records.values())

    @property
    def seconds_left(self) -> float | None:
        jobs = self.records.values()
        times = [r.ended - r.started for r in jobs if r.state == DONE and r.ended and r.started]
        # Do not count a job that was stopped since the latest start: it waits for the next start.
        waiting = [r for r in jobs if r.state == WAITING and (r.ended or 0.0) < self.started]
        left = [1.0] * len(waiting) + [_share_left(r) for r in jobs if r.state == RUNNING]
        return fmean(times) * max([sum(left) / self.num_slots, *left]) if times else None

    def progress(self) -> str:
        """Return the progress as text, such as "2 done, 1 failed, about 3 m 10 s left"."""
        states = (DONE, RUNNING, WAITING, FAILED)
        parts = [f"{num} {state}" for state in states if (num := self.num_by_state[state])]
        left = self.seconds_left
        return ", ".join(parts + ([f"about {format_time(left)} left"] if left else []))

    def line_of(self, number: int, log: Path | None = None) -> str:
        """Return one line: the job's state, its error (and `log`) or result, and the progress."""
        record, position = self.records[number], list(self.records).index(number) + 1
        line = f"{record.state} job {position} of {len(self.records)}: {self.labels[number]}"
        if record.ended and record.state in (FAILED, WAITING):
            line += f", {record.error}" + (f" ({relative_path(log)})" if log else "")
        elif record.state == DONE and record.result is not None:
            line += f", training reward {record.result:.3f}"
        return f"{line}; {self.progress()}"


def _share_left(record: JobRecord) -> float:
    """Return the share of a running job's steps that are not done; 1 if max_steps is unknown."""
    num_steps = 0
    with suppress(OSError):
        num_steps = num_steps_done(RunFolder(Path(str(record.folder))))
    return max(1 - num_steps / record.max_steps, 0.0) if record.max_steps else 1.0


def read_jobs(sweep: SweepFolder) -> RecordedJobs:
    """Return the jobs of the latest start, or all jobs if the sweeper chooses jobs by results."""
    records, info = sweep.records(), sweep.read_info()
    numbers = set(info.get("jobs") or ())
    kept = {n: record for n, record in records.items() if not numbers or n in numbers}
    return RecordedJobs(kept, info.get("started") or 0.0, len(info.get("slots") or [None]))


def start_message(sweep: SweepFolder, command: str) -> str:
    jobs, info = read_jobs(sweep), sweep.read_info()
    lines, parts = [info.get("question") or ""], [f"sweep {relative_path(sweep.path)}"]
    if jobs.records:
        waiting = [r for r in jobs.records.values() if r.state == WAITING and r.folder]
        begun = sum(RunFolder(Path(str(record.folder))).has_results() for record in waiting)
        parts += [f"{len(jobs.records)} jobs"]
        parts += [f"{jobs.num_by_state[DONE]} already done"] if jobs.num_by_state[DONE] else []
        parts += [f"{begun} to be resumed"] if begun else []
    if slots := info["slots"]:
        cores, gpus = len(slots[0]["cores"]), len(slots[0]["gpus"])
        parts[-1] += f"; {len(slots)} in parallel (cores of each: {cores}, GPUs of each: {gpus})"
    lines.append(", ".join(parts))
    if not info.get("jobs") or jobs.num_by_state[DONE] < len(jobs.records):
        lines.append(f"to resume the sweep after an interruption:\n  {command}")
    return "\n".join(line for line in lines if line)


@contextmanager
def printing_changes(sweep: SweepFolder) -> Iterator[None]:
    """While the block runs, print each change of a job's state, and the progress every minute."""
    end, states = Event(), {n: record.state for n, record in read_jobs(sweep).records.items()}
    thread = Thread(target=_print_changes, args=(sweep, states, end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _print_changes(sweep: SweepFolder, states: dict[int, str], end: Event) -> None:
    last_progress, is_over = time.monotonic(), False
    with suppress(OSError):  # a closed terminal must not end the sweep
        while not is_over:
            is_over = end.wait(_TICK_S)  # print the last changes after `end` is set
            jobs = read_jobs(sweep)
            now = {number: record.state for number, record in jobs.records.items()}
            changed = [n for n, state in now.items() if state != states.get(n, WAITING)]
            lines = [jobs.line_of(n, sweep.log_of(n)) for n in changed]
            states |= now
            if time.monotonic() - last_progress >= _PROGRESS_EVERY_S:
                last_progress = time.monotonic()
                lines.append(jobs.progress())
            for line in lines:
                say(f"{time.strftime('%H:%M:%S')} {line}")


def print_end(sweep: SweepFolder, command: str) -> None:
    """Print that all jobs are finished, or how many are not and the `command` that resumes them."""
    jobs = read_jobs(sweep)
    left, failed = len(jobs.records) - jobs.num_by_state[DONE], jobs.num_by_state[FAILED]
    if left:
        why = f" ({failed} failed)" if failed else ""
        say(f"{left} of {len(jobs.records)} jobs are not done{why}; to resume them:\n  {command}")
    elif sweep.read_info().get("jobs"):  # a ChoosingSweeper may not have recorded all jobs
        say(f"all {len(jobs.records)} jobs are finished")
