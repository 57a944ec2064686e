"""Run a report card: the first row at each learning rate, then the other rows at the best rate."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lab.report.card import LADDER_ROW, VARIED, Card, card_of, read_cards, read_rows, write_page
from lab.report.run import RUN_KEYS
from lab.sweeps.sweeper import ChoosingSweeper, Jobs, parse_jobs
from rl.config.shipped import SHIPPED
from rl.runtime.sweep_folder import DONE, WAITING, SweepFolder, identity
from rl.runtime.text import key_of, say
from rl.terminal.panel import format_time

ROWS, STORED = SHIPPED / "sweeps" / "row", SHIPPED / "baselines" / "report_card"
RATE = "optim.learning_rate"
TYPICAL_S = 40.0  # assumed seconds of a run if no card is stored


class CardSweeper(ChoosingSweeper):
    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        jobs = parse_jobs(arguments)
        first_row, others = split_jobs(jobs, self.config.card.ladder)
        say(remaining_work(self.folder, [*first_row, *others]))
        returns = self.launch(first_row, 0)
        rate = card_of_ended_jobs("", self.folder, jobs).rate
        # A job of the first row that reached its max_time waits. Its score may change the rate.
        is_waiting = any(one.state == WAITING for _, one in self.folder.claim_all(first_row))
        if rate is not None and not is_waiting:
            returns += self.launch([[*job, f"{RATE}={rate}"] for job in others], len(first_row))
        for one in returns:
            _ = one.return_value  # this property raises the error of a failed job
        return returns


def split_jobs(jobs: Jobs, rates: Sequence[float]) -> tuple[Jobs, Jobs]:
    """Return the first row's jobs at each learning rate, and the other rows' jobs without one."""
    rows, first_row, others = read_rows(ROWS), dict[tuple[str, ...], None](), []
    for job in jobs:
        own = {key_of(item): item.partition("=")[2] for item in job}
        kept = [item for item in job if key_of(item) not in ("row", "card.level", RATE)]
        for rate in [own[RATE]] if RATE in own else rates:
            first_row[*kept, f"row={LADDER_ROW}", "card.level=easy", f"{RATE}={rate}"] = None
        if own["row"] != LADDER_ROW and own["card.level"] in rows[own["row"]]["levels"]:
            others.append([item for item in job if key_of(item) != RATE])
    return [list(job) for job in first_row], others


def remaining_work(sweep: SweepFolder, jobs: Jobs) -> str:
    """Return the number of jobs that are not done, and their expected duration, as text."""
    done = [identity(r.overrides) for r in sweep.records().values() if r.state == DONE]
    done += [tuple(item for item in one if key_of(item) != RATE) for one in done]
    left = [job for job in jobs if identity(job) not in done]
    seconds = [cell.seconds for card in read_cards(STORED) for cell in card.cells] or [TYPICAL_S]
    total = len(left) * fmean(seconds) / len(sweep.read_info().get("slots") or [None])
    each = format_time(fmean(seconds))
    return f"{len(left)} runs are not done: about {each} each, {format_time(total)} in total"


def card_of_ended_jobs(name: str, sweep: SweepFolder, jobs: Jobs) -> Card:
    """Return the card of ended jobs that differ from `jobs` only in keys of VARIED and RUN_KEYS."""
    common = [item for item in jobs[0] if key_of(item) not in {*VARIED, *RUN_KEYS}]
    name = " ".join([name, *(item for item in common if key_of(item) != "loss")])
    return card_of(name, sweep.records().values(), common, read_rows(ROWS))


def write_card(name: str, sweep: SweepFolder, jobs: Jobs) -> None:
    """Write the page of the ended jobs, if there are any, and print its numbers."""
    card, page = card_of_ended_jobs(name, sweep, jobs), sweep.path / "report.html"
    if card.cells:
        say(write_page(page, card, read_cards(STORED), read_rows(ROWS)))
