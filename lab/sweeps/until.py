"""Add seeds to the arms of a sweep until each arm is decided (until=decided).

An arm is decided if it is better than, worse than or equal to the first arm (docs/sweeps.md), else
it is open. Each launch runs the next seeds of the first arm and of the open arms. A resumed sweep
computes the decisions again from its finished runs.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from math import inf, nan
from statistics import fmean
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobStatus

from lab.report.arms import arms_of
from lab.report.command import report
from lab.report.comparison import Comparison, NoBaseline, NothingToCompare, compare
from lab.report.run import RUN_KEYS
from lab.report.sequential import State
from lab.report.sources import read_sources
from lab.report.statistics import ERROR, OPEN, Interval, Spread
from lab.sweeps.job import is_done
from lab.sweeps.sweeper import ChoosingSweeper, parse_jobs
from rl.runtime.sweep_folder import JobRecord, SweepFolder, identity, labels
from rl.runtime.text import key_of, say
from rl.terminal.panel import format_time

ASSUMED_SD = 0.02  # assumed standard deviation of scores between seeds (in the default run: 0.018)
MOST_FAILURES = 3  # after this many failed jobs, the sweep launches no more jobs


class UntilDecided(ChoosingSweeper):
    def sweep(self, arguments: list[str]) -> Any:
        """Launch jobs until every arm is decided, the time is spent, or too many jobs failed."""
        assert self.config is not None
        sweep, arms = self.folder, parse_jobs(arguments)
        size = self.max_batch_size or len(sweep.read_info()["slots"]) or len(arms)
        size = 1 if isinstance(self.launcher, BasicLauncher) else size
        baseline = " ".join(sorted(item for item in arms[0] if key_of(item) not in RUN_KEYS))
        returns, tried = [], set()
        while True:
            state = Progress(sweep, arms, size, **self.config.until)
            failed = [one for one in returns if one.status == JobStatus.FAILED]
            has_no_score = state.done_by_arm[0] and not state.comparison  # as with demonstrations
            is_over = state.is_time_spent or len(failed) >= MOST_FAILURES or has_no_score
            batch = [] if is_over else list(islice(state.next_jobs(tried), size))
            sweep.write_info(sweep.read_info() | {"progress": state.text(), "baseline": baseline})
            if not batch:
                break
            if state.comparison:  # the report also prints `state.text()`
                report([sweep.path], sweep.path / "report.html")
            else:
                say(f"\n{state.text()}")
            tried |= {identity(job) for job in batch}
            returns += self.launch(batch, len(returns))
        for one in failed:
            _ = one.return_value  # this property raises the error of a failed job
        return returns


@dataclass(frozen=True)
class Progress:
    sweep: SweepFolder
    arms: list[list[str]]  # the overrides of each arm; the first arm is the baseline
    size: int  # number of jobs that run in parallel
    smallest_effect: float
    max_hours: float | None = None

    @cached_property
    def done_jobs(self) -> dict[tuple[str, ...], JobRecord]:
        records = self.sweep.records().values()
        return {identity(r.overrides): r for r in records if is_done(r, r.max_steps or 0)}

    @cached_property
    def comparison(self) -> Comparison | None:
        """Return the comparison with the first arm, None if the first arm has no score yet."""
        arms = arms_of(read_sources([self.sweep.path]).runs)
        done = {str(record.folder) for record in self.done_by_arm[0]}
        labels = [a.label for a in arms if any(str(run.folder) in done for run in a.runs)]
        try:
            effect = self.smallest_effect
            return compare(arms, baseline=labels[0], smallest_effect=effect) if labels else None
        except (NothingToCompare, NoBaseline):
            return None

    @cached_property
    def done_by_arm(self) -> list[list[JobRecord]]:
        arms = [{*identity(arm)} for arm in self.arms]
        return [[r for job, r in self.done_jobs.items() if arm <= {*job}] for arm in arms]

    @cached_property
    def seeds_needed(self) -> dict[int, float]:
        """Return how many seeds in total each open arm probably needs, by the arm's index."""
        found: dict[int, float] = {}
        known = self.comparison.results if self.comparison else ()
        by_folder = {str(run.folder): result for result in known for run in result.arm.runs}
        for index, records in enumerate(self.done_by_arm[1:], 1):
            result = next(filter(None, (by_folder.get(str(r.folder)) for r in records)), None)
            if result is None or result.decision == OPEN:
                found[index] = (result and result.seeds_needed) or self._seeds_needed_at_assumed_sd
            if result is None and records and known:  # its runs have no score
                found[index] = inf
        return found

    @property
    def _seeds_needed_at_assumed_sd(self) -> float:
        spread = Spread(((ASSUMED_SD**2, 1), (ASSUMED_SD**2, 1)), 0.0, 0.0, 0)
        error, unknown = ERROR / (len(self.arms) - 1), Interval(0.0, nan, nan)
        return State(unknown, self.smallest_effect, error, OPEN, spread).seeds_needed or inf

    def next_jobs(self, tried: Collection[tuple[str, ...]]) -> Iterator[list[str]]:
        open_arms = [index for index, needed in self.seeds_needed.items() if needed < inf]
        wanted = [0, *open_arms] if open_arms else []
        if inf in self.seeds_needed.values():  # if no seeds help an arm, rerun its unfinished jobs
            others = {0, *self.seeds_needed} - {*wanted}
            arms = [{*identity(self.arms[index])} for index in others]
            for record in self.sweep.records().values():
                job = identity(record.overrides)
                if job not in {*self.done_jobs, *tried} and any(a <= {*job} for a in arms):
                    yield record.overrides
        for seed in count() if wanted else ():
            for job in ([*self.arms[index], f"seed={seed}"] for index in wanted):
                if identity(job) not in self.done_jobs and identity(job) not in tried:
                    yield job

    @cached_property
    def timings(self) -> tuple[float, float]:
        """Return the mean seconds of the done jobs, and the seconds in which any job ran."""
        records = self.sweep.records().values()
        ran, until = 0.0, 0.0
        for started, ended in sorted(
            (r.started, r.ended) for r in records if r.started and r.ended
        ):
            ran, until = ran + max(ended - max(started, until), 0.0), max(ended, until)
        done = [(r.ended or 0.0) - (r.started or 0.0) for r in self.done_jobs.values()]
        return fmean(done) if done else 0.0, ran

    @property
    def is_time_spent(self) -> bool:
        """Return whether the next job is expected to end after `max_hours`."""
        return self.max_hours is not None and sum(self.timings) > self.max_hours * 3600

    def text(self) -> str:
        """Describe which arms are open, and how many runs and how much time they probably need."""
        num_others, needed, (each, ran) = len(self.arms) - 1, self.seeds_needed, self.timings
        text = f"{num_others - len(needed)} of {num_others} arms decided"
        if not needed:
            return f"{text} by {len(self.done_jobs)} runs in {format_time(ran)}."
        names, seeds = labels(self.arms), [len(records) for records in self.done_by_arm]
        text += f"; open: {', '.join(f'{names[i]} ({seeds[i]} seeds)' for i in needed)}"
        if inf in needed.values():
            text += (
                "; more seeds cannot decide some of these arms, but more questions can, and so can "
                "the missing scores of lost runs and of unscored rollouts"
            )
        if self.is_time_spent:
            return f"{text}; until.max_hours={self.max_hours:g} is spent ({format_time(ran)})."
        likely = {i: max(n, seeds[i] + 1) for i, n in needed.items() if n < inf}
        most = max(likely.values(), default=0)
        runs = sum(n - seeds[i] for i, n in likely.items()) + max(most - seeds[0], 0)
        text += f". Probably still needed: {runs:.0f} runs"
        if not each:
            return (
                f"{text} ({most:.0f} seeds of each arm, if the scores of seeds have the standard "
                f"deviation {ASSUMED_SD}); their time is known after the first run."
            )
        left = runs * each / min(self.size, runs or 1)
        return f"{text} of {format_time(each)}, {format_time(left)} in total."
