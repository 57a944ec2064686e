"""The report card of a loss: its scores in small experiments, next to the cards of other losses.

sweeps/report_card.yaml is the sweep that runs the experiments. Each file of sweeps/row is a row of
the card. Every row except `basic` adds one difficulty, at the levels easy and hard.
docs/report-card.md explains the numbers.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.resources import files
from math import isnan, nan, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import jinja2
import msgspec
import yaml
from scipy import stats

from lab.report.evaluations import evaluated_versions
from lab.report.run import RUN_KEYS
from rl.runtime.folder import RunFolder, read_records
from rl.runtime.start_record import read_record
from rl.runtime.sweep_folder import DONE, FAILED, JobRecord
from rl.runtime.text import key_of

LADDER_ROW = "basic"  # the first row, whose jobs try the learning rates of card.ladder
Row: TypeAlias = dict[str, Any]  # the node `card` of a file of sweeps/row, with title, levels, ...
VARIED = ("row", "card.level", "seed", "optim.learning_rate")  # keys in which a card's jobs differ


class Cell(msgspec.Struct, frozen=True):
    """The runs of a row at one level and one learning rate."""

    row: str
    level: str
    rate: float
    starts: list[float]  # score of each run before training
    scores: list[float]  # score of each run's last evaluated version, 0 if the run failed
    seconds: float  # mean duration of a run, its start included
    failed: int = 0  # number of failed runs


class Card(msgspec.Struct):
    name: str
    day: str
    commit: str
    minutes: float
    cells: list[Cell]

    @property
    def rate(self) -> float | None:
        """Return the learning rate with the best score in LADDER_ROW, None without that row."""
        return max(self.score_by_rate, key=lambda rate: self.score_by_rate[rate], default=None)

    @property
    def score_by_rate(self) -> dict[float, float]:
        """Return the mean score in LADDER_ROW of each learning rate."""
        return {one.rate: fmean(one.scores) for one in self.cells if one.row == LADDER_ROW}

    def best_cells(self, row: str) -> list[Cell]:
        """Return the cells of a row at the best learning rate."""
        return [cell for cell in self.cells if (cell.row, cell.rate) == (row, self.rate)]

    def interval(self, row: str) -> tuple[float, float]:
        """Return the mean score of `best_cells(row)`, and half the width of its 95 % interval.

        The variance between seeds is pooled over the cells of the row at all learning rates.
        """
        scores = [score for cell in self.best_cells(row) for score in cell.scores]
        pooled = [cell.scores for cell in self.cells if cell.row == row]
        freedom = sum(len(one) - 1 for one in pooled)
        if not freedom or not scores:
            return fmean(scores) if scores else nan, nan
        squares = sum((score - fmean(one)) ** 2 for one in pooled for score in one)
        radius = stats.t.ppf(0.975, freedom) * sqrt(squares / freedom / len(scores))
        return fmean(scores), float(radius)


def read_rows(folder: Path) -> dict[str, Row]:
    paths = sorted(folder.glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text())["card"] for path in paths}


def read_cards(folder: Path) -> list[Card]:
    paths = sorted(folder.glob("*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=Card) for path in paths]


def card_of(
    name: str, records: Iterable[JobRecord], common: Iterable[str], rows: dict[str, Row]
) -> Card:
    """Return a card called `name` of the jobs that are done or failed.

    Ignore overrides of VARIED and RUN_KEYS. Leave out a job whose other overrides are not `common`.
    """
    runs: dict[tuple[str, str, float], list[tuple[float, float, float, bool]]] = defaultdict(list)
    commits: dict[str, None] = {}
    for record in records:
        own = dict(item.split("=", 1) for item in record.overrides if key_of(item) in VARIED)
        others = [item for item in record.overrides if key_of(item) not in {*VARIED, *RUN_KEYS}]
        ended = record.state in (DONE, FAILED)
        if not ended or {*others} != {*common} or own.keys() != {*VARIED}:
            continue
        folder, row = RunFolder(Path(str(record.folder))), own["row"]
        scores = []
        for version in evaluated_versions(folder):
            rewards = [line["rewards"] for line in read_records(folder.evaluation_of(version))]
            known = [x for one in rewards if (x := one.get(rows[row]["measure"])) is not None]
            scores += [fmean(known)] if known else []
        if not scores:
            continue  # the run has no evaluation, or no rollout has the row's reward
        seconds = (record.ended or 0.0) - (record.started or 0.0)
        key = row, own["card.level"], float(own["optim.learning_rate"])
        failed = record.state == FAILED
        runs[key].append((scores[0], 0.0 if failed else scores[-1], seconds, failed))
        commit = read_record(folder).get("commit", "")
        commits[f"{commit[:10]}{commit[40:]}"] = None  # keep the suffix +uncommitted
    cells = [
        Cell(*key, list(starts), list(scores), fmean(seconds), sum(failed))
        for key, of_cell in runs.items()
        for starts, scores, seconds, failed in [zip(*of_cell, strict=True)]
    ]
    minutes = sum(cell.seconds * len(cell.scores) for cell in cells) / 60
    return Card(name, time.strftime("%Y-%m-%d"), ", ".join(filter(None, commits)), minutes, cells)


def write_page(path: Path, card: Card, stored: Sequence[Card], rows: dict[str, Row]) -> str:
    """Write the page at `path`, and the card as a .json file. Return the text for the terminal."""
    stored = [one for one in stored if one.name != card.name]
    path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(card)) + b"\n")
    played = {name: row for name, row in rows.items() if card.best_cells(name)}
    shown, clear = [], []
    for name in sorted(played, key=lambda name: name != LADDER_ROW):
        own, *others = (_line(c, name, played[name]) for c in (card, *stored) if c.best_cells(name))
        shown.append({"row": played[name], "lines": [own, *others]})
        others = [one for one in others if one["played"] == own["played"]]
        lower = [one["name"] for one in others if own["high"] < one["low"]]
        higher = [one["name"] for one in others if own["low"] > one["high"]]
        clear += [f"{played[name]['title']}: lower than {', '.join(lower)}"] if lower else []
        clear += [f"{played[name]['title']}: higher than {', '.join(higher)}"] if higher else []
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("lab.report").joinpath("card.html").read_text())
    missing = [row["title"] for name, row in rows.items() if name not in played]
    page = {"cards": [card, *stored], "rows": shown, "clear": clear, "missing": missing}
    path.write_text(template.render(card=card, **page), errors="replace")
    lines = [f"{one['row']['title']:32} {one['lines'][0]['text']}" for one in shown]
    return "\n".join([f"report card of {card.name}", *lines, *clear, f"page    {path}"])


def _line(card: Card, name: str, row: Row) -> dict[str, Any]:
    """Return the numbers and texts that the page shows of one card in row `name`."""
    mean, radius = card.interval(name)
    levels = [
        f"{' '.join(value) if isinstance(value, dict) else value}: "
        f"{fmean(cell.starts):.2f} → {fmean(cell.scores):.2f}"
        for level, value in row["levels"].items()
        for cell in card.best_cells(name)
        if cell.level == level
    ]
    low, high = max(mean - radius, 0.0), min(mean + radius, 1.0)
    played = {cell.level for cell in card.best_cells(name)}
    line = {"name": card.name, "mean": mean, "low": low, "high": high, "levels": levels}
    ends = "one seed" if isnan(radius) else f"{low:.2f}..{high:.2f}"
    only = "" if played == {*row["levels"]} else f", only {' and '.join(sorted(played))}"
    num_failed = sum(cell.failed for cell in card.best_cells(name))
    failed = f", {num_failed} failed" if num_failed else ""
    return line | {"played": played, "text": f"{mean:.2f}  {ends}{only}{failed}"}
