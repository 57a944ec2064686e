"""The report card of a loss."""

import json
import re
from itertools import product
from types import SimpleNamespace

import msgspec
import pytest
from hydra.core.utils import JobReturn, JobStatus

from lab.report.card import Card, Cell, card_of, read_cards, read_rows, write_page
from lab.sweeps import card as cards
from lab.sweeps.card import RATE, ROWS, split_jobs
from rl.runtime.folder import RunFolder
from rl.runtime.sweep_folder import SWEEP_VARIABLE, SweepFolder
from tests.support.composing import check_all, composed
from tests.support.golden import golden, without

ROW_NAMES = sorted(path.stem for path in ROWS.glob("*.yaml"))


def play(sweep, overrides, start, score, state="done"):
    """Write a job that has ended, with two held-out rollouts of two versions."""
    number, record = sweep.claim(overrides)
    folder = RunFolder(sweep.path / f"run-{number}")
    folder.evaluations.mkdir(parents=True)
    for version, mean in ((0, start), (40, score)):
        rewards = ({"exact": mean + 0.1}, {"exact": mean - 0.1, "kept": 1.0}, {})
        lines = [json.dumps({"rewards": one}) + "\n" for one in rewards]
        folder.evaluation_of(version).write_text("".join(lines))
    record.folder, record.state, record.started, record.ended = str(folder.path), state, 0.0, 60.0
    sweep.write(number, record)


def job(row, level, rate, seed):
    return [f"seed={seed}", f"row={row}", f"card.level={level}", "loss=mine", f"{RATE}={rate}"]


def jobs_of(*rows):
    cells = product(rows, ("easy", "hard"))
    return [["seed=0", f"row={row}", f"card.level={level}", "loss=mine"] for row, level in cells]


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "sweep").mkdir()
    sweep = SweepFolder(tmp_path / "sweep")
    for rate, scores in ((1e-4, (0.3, 0.5)), (5e-4, (0.7, 0.9))):
        for seed, score in enumerate(scores):
            play(sweep, job("basic", "easy", rate, seed), 0.2 + seed / 10, score)
    for level, score in (("easy", 0.6), ("hard", 0.2)):
        for seed in (0, 1):
            play(sweep, job("staleness", level, 5e-4, seed), 0.2 + seed / 10, score + seed / 10)
    play(sweep, [*job("staleness", "hard", 5e-4, 0), "loss.clip_high=9"], 0.3, 1.0)  # not this loss
    return sweep


def card(sweep, name="mine"):
    return card_of(name, sweep.records().values(), ["loss=mine"], read_rows(ROWS))


def test_a_row_is_scored_at_the_best_rate_with_an_interval_of_all_its_seeds(sweep):
    mine = card(sweep)
    assert mine.rate == 5e-4
    assert mine.minutes == 8
    # Each of the two rates has seeds 0.2 apart: variance 0.02 with 2 degrees of freedom.
    mean, radius = mine.interval("basic")
    assert mean == pytest.approx(0.8)
    assert radius == pytest.approx(4.30265 * (0.02 / 2) ** 0.5, rel=1e-4)
    mean, radius = mine.interval("staleness")
    assert mean == pytest.approx(0.45)
    assert radius == pytest.approx(4.30265 * (0.005 / 4) ** 0.5, rel=1e-4)


def test_a_failed_run_has_score_0_and_is_named(sweep, tmp_path):
    for level, state, score in (("easy", "done", 0.6), ("hard", "failed", 0.9)):
        play(sweep, job("reuse", level, 5e-4, 0), 0.3, score, state)
    play(sweep, job("reuse", "hard", 5e-4, 1), 0.3, 0.9, "running")
    mine = card(sweep)
    cells = [(one.scores, one.failed) for one in mine.best_cells("reuse")]
    assert cells == [([0.6], 0), ([0.0], 1)]
    text = write_page(tmp_path / "report.html", mine, [], read_rows(ROWS))
    assert re.search(r"Reuse of a batch +0\.30  one seed, 1 failed", text)
    assert "0.30  one seed, 1 failed" in (tmp_path / "report.html").read_text()


def test_a_loss_is_compared_neither_with_itself_nor_in_a_row_without_all_levels(sweep, tmp_path):
    def page_beside(name, levels):
        places = [("basic", "easy"), *(("staleness", level) for level in levels)]
        cells = [Cell(row, x, 1e-3, [0.3, 0.3], [0.8, 0.82], 30.0) for row, x in places]
        stored = Card(name, "2026-11-26", "abc", 3.0, cells)
        return write_page(tmp_path / "report.html", card(sweep), [stored], read_rows(ROWS))

    text = page_beside("cispo", ["easy", "hard"])
    assert "Staleness: lower than cispo" in text
    assert "Basic learning: " not in text  # because the intervals overlap
    assert "lower than" not in page_beside("mine", ["easy", "hard"])
    assert "lower than" not in page_beside("cispo", ["easy"])
    assert ", only easy" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("state", "starts_others"), [("failed", True), ("waiting", False)])
def test_a_rate_that_fails_does_not_block_the_other_rows(
    state, starts_others, tmp_path, monkeypatch
):
    """One of two learning rates ends in `state`; the other one scores more."""
    sweep, launched = SweepFolder(tmp_path), []
    sweep.write_info({})

    def launch(given, initial_job_idx):
        launched.append([one[-1] for one in given])
        for one, score in zip(given, (0.4, 0.5), strict=False):
            play(sweep, one, 0.3, score, state if score == 0.4 and initial_job_idx == 0 else "done")
        return [JobReturn(status=JobStatus.FAILED, _return_value=KeyError("the rate"))]

    monkeypatch.setenv(SWEEP_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cards, "parse_jobs", lambda _: jobs_of("staleness", "basic"))
    sweeper = object.__new__(cards.CardSweeper)
    sweeper.config = SimpleNamespace(card=SimpleNamespace(ladder=[1e-4, 5e-4]))
    sweeper.launcher = SimpleNamespace(launch=launch)
    with pytest.raises(KeyError):
        sweeper.sweep([])
    ladder, others = [f"{RATE}=0.0001", f"{RATE}=0.0005"], [f"{RATE}=0.0005"] * 2
    assert launched == ([ladder, others] if starts_others else [ladder])


@pytest.mark.parametrize("row", ROW_NAMES)
def test_every_level_of_every_row_is_a_run_that_could_start(row, tmp_path):
    for level in read_rows(ROWS)[row]["levels"]:
        choices = [f"row={row}", f"card.level={level}", f"output_dir={tmp_path}"]
        config = composed(*choices, sweep="report_card")
        check_all(config)
        assert "card" not in config


def test_a_report_card_and_what_is_left_of_it(sweep, tmp_path, monkeypatch):
    """The cells of a card, its page beside a stored card, and the jobs that are not done."""
    monkeypatch.setattr("lab.sweeps.card.STORED", tmp_path)
    play(sweep, job("noise", "easy", 5e-4, 0), 0.2, 0.5)
    stored = [Cell("basic", "easy", 1e-3, [0.1, 0.3], [0.05, 0.07], 30.0)]
    stored += [
        Cell("staleness", x, 1e-3, [0.3] * 3, [0.8, 0.81, 0.79], 50) for x in ("easy", "hard")
    ]
    cispo, rows = Card("cispo", "2020-01-02", "abc", 3.25, stored), read_rows(ROWS)
    own = card(sweep)
    texts = [write_page(tmp_path / "cispo.html", cispo, [own], rows)]
    texts.append(write_page(tmp_path / "page.html", own, read_cards(tmp_path), rows))
    jobs = jobs_of("basic", "staleness", "noise", "memory")
    ladder, others = split_jobs(jobs, [1e-4, 5e-4])
    page = re.sub(r"<style>.*</style>", "", (tmp_path / "page.html").read_text(), flags=re.S)
    found = {
        "card": msgspec.to_builtins(own)
        | {"day": "", "rate": own.rate, "ladder": own.score_by_rate},
        "intervals": [own.interval(row) for row in (*rows, "none")],
        "texts": texts, "page": page.replace(own.day, "").splitlines(), "jobs": [ladder, others],
        "left": [cards.remaining_work(sweep, some) for some in (ladder, others, ladder + others)],
        "other": cards.card_of_ended_jobs("x", sweep, [[*jobs[0], "kl=k3"]]).name,
    }  # fmt: skip
    golden("sweeps/card", without(tmp_path, found))
