"""How far a sweep is, in words: at its beginning, before each job, at its end."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from statistics import fmean

from rl.config.resume_rules import has_steps
from rl.report.panel import duration
from rl.run.sweep_folder import DONE, FAILED, RUNNING, WAITING, JobRecord, SweepFolder, labels
from rl.run.typed import as_typed

STATES = (DONE, RUNNING, WAITING, FAILED)


def what_will_be_done(sweep: SweepFolder, again: str) -> str:
    """The sweep's first lines; `again` is the command that goes on with it."""
    records, info = jobs_of_now(sweep), sweep.read_info()
    lines, parts = [info.get("question") or ""], [f"sweep {as_typed(sweep.path)}"]
    if records:
        counts, begun = states(records.values()), num_begun(records.values())
        parts += [f"{len(records)} jobs"]
        parts += [f"{counts[DONE]} done before"] if counts[DONE] else []
        parts += [f"{begun} to be taken up where they stopped"] if begun else []
    lines.append(", ".join(parts) + at_once(info["slots"]))
    lines.append(f"if it is cut short, this goes on with it:\n  {again}")
    return "\n".join(line for line in lines if line)


def at_once(slots: list[dict[str, list[str]]]) -> str:
    """How many jobs run side by side, and with what each."""
    if not slots:
        return ""
    cores, gpus = len(slots[0]["cores"]), len(slots[0]["gpus"])
    each = [f"{cores} {'core' if cores == 1 else 'cores'}"]
    each += [f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}"] if gpus else []
    return f"; {len(slots)} at once, each on {' and '.join(each)}"


def announce(sweep: SweepFolder, number: int) -> None:
    """Say before a job that has the terminal which one it is, and how far the others are."""
    records = jobs_of_now(sweep)
    place, label = list(records).index(number) + 1, labels_of(records)[number]
    parts = [f"job {place} of {len(records)}: {label}"]
    counts = states(records.values())
    parts += [f"{counts[state]} {state}" for state in (DONE, FAILED) if counts[state]]
    if each := seconds_of_a_job(records.values()):
        left = num_to_come(records.values(), sweep.read_info()["started"]) + counts[RUNNING]
        parts.append(f"about {duration(each * left)} left")
    print("\n" + ", ".join(parts), flush=True)  # noqa: T201


def what_is_left(sweep: SweepFolder, again: str) -> str:
    """What the same command would still do, nothing where all is done."""
    records = jobs_of_now(sweep)
    left = [record for record in records.values() if record.state != DONE]
    if not left:
        return ""
    failed = states(left)[FAILED]
    why = f" ({failed} failed)" if failed else ""
    return (
        f"{len(left)} of {len(records)} jobs are not done{why}; this goes on with them:\n  {again}"
    )


def jobs_of_now(sweep: SweepFolder) -> dict[int, JobRecord]:
    """The jobs of the sweep's last start; all where the sweeper did not know them beforehand."""
    records, numbers = sweep.records(), sweep.read_info().get("jobs")
    return {n: record for n, record in records.items() if not numbers or n in numbers}


def labels_of(records: dict[int, JobRecord]) -> dict[int, str]:
    """What tells each job from the others."""
    return dict(zip(records, labels([r.overrides for r in records.values()]), strict=True))


def states(records: Collection[JobRecord]) -> Counter[str]:
    """How many jobs are in each state."""
    return Counter(record.state for record in records)


def num_to_come(records: Collection[JobRecord], started: float) -> int:
    """How many jobs this start of the sweep will begin: who ended since waits for the next."""
    return sum(r.state == WAITING and (r.ended or 0.0) < started for r in records)


def num_begun(records: Collection[JobRecord]) -> int:
    """How many jobs that will be run have done some of it."""
    waiting = (record for record in records if record.state == WAITING and record.folder)
    return sum(has_steps(Path(str(record.folder))) for record in waiting)


def seconds_of_a_job(records: Collection[JobRecord]) -> float | None:
    """What a job takes by those that are done."""
    done = [record for record in records if record.state == DONE]
    times = [r.ended - r.started for r in done if r.ended and r.started]
    return fmean(times) if times else None
