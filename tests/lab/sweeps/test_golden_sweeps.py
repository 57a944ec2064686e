"""The texts and records of sweeps, as stored files."""

import re

import msgspec
import pytest

from lab.report.card import Card, Cell, card_of, read_cards, read_rows, write_page
from lab.sweeps.card import ROWS, card_of_ended_jobs, remaining_work, split_jobs
from lab.sweeps.overview import print_unfinished, read_jobs, start_message
from lab.sweeps.until import Progress
from rl.runtime.folder import RunFolder
from rl.runtime.sweep_folder import SweepFolder
from tests.lab.sweeps.test_card import job, play
from tests.lab.sweeps.test_until import ARMS, next_of, play_seeds
from tests.support.golden import golden
from tests.support.outcomes import without


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "sweep").mkdir()
    return SweepFolder(tmp_path / "sweep")


def test_the_lines_about_jobs_in_every_state(sweep, tmp_path, monkeypatch, capsys):
    """start_message, progress, the line of each job, and the last lines."""
    monkeypatch.chdir(tmp_path)
    states = {
        "done": (1.0, 31.0, 0.25, None),
        "done too": (10.0, 100.0, None, None),
        "failed": (0.0, 5.0, None, "vLLM ended"),
        "waiting, stopped before": (0.0, 50.0, None, "interrupted"),
        "waiting, stopped now": (150.0, 170.0, None, "max_time"),
        "running": (150.0, None, None, "did not end"),
        "waiting": (None, None, None, "not started"),
    }
    for name, times in states.items():
        number, record = sweep.claim(["max_steps=9", f"loss={name}", "seed=0"])
        record.state = name.replace(",", "").split()[0]
        record.started, record.ended, record.result, record.error = times
        if "stopped" in name:
            record.folder = str(tmp_path / name)
            (tmp_path / name).mkdir()
            RunFolder(tmp_path / name).metrics.write_text('{"step": 0}\n')
        sweep.write(number, record)
    slots, found = [{"cores": [0, 1, 2], "gpus": ["3"]}] * 2, {}
    for info in ({"question": "Why?", "slots": slots, "started": 120.0},
                 {"slots": [], "jobs": [0, 2, 3], "started": 0.0}):  # fmt: skip
        sweep.write_info(info)
        jobs = read_jobs(sweep)
        lines = [jobs.line_of(number, sweep.log_of(number)) for number in jobs.records]
        print_unfinished(sweep, "python train.py")
        start = start_message(sweep, "python train.py").splitlines()
        found[f"{len(lines)} jobs"] = [start, lines, jobs.seconds_left, capsys.readouterr().out]
    golden("sweeps/overview", without(tmp_path, found))


def test_what_a_sweep_that_adds_seeds_says_and_starts_next(sweep):
    """The text, the next jobs and the seeds needed, from no run to decided arms and spent hours."""
    found = {}

    def describe(name, arms=ARMS, size=2, effect=0.1, **options):
        one = Progress(sweep, arms, size, effect, **options)
        needed = {str(key): value for key, value in one.seeds_needed.items()}
        found[name] = [one.text(), next_of(one, number=7), needed, one.timings, one.is_time_spent]

    describe("nothing")
    describe("a small effect", effect=0.02, size=1)
    play_seeds(sweep, ARMS[0], range(4), 0.5)
    describe("the baseline alone")
    for arm, reward in zip(ARMS[1:], (0.7, 0.56), strict=True):
        play_seeds(sweep, arm, range(3), reward)
    describe("some seeds")
    describe("spent", max_hours=0.18)
    describe("not spent", max_hours=0.19)
    describe("every arm is decided", arms=ARMS[:2])
    describe("a smaller effect", effect=0.005)
    golden("sweeps/until", found)


def test_a_report_card_and_what_is_left_of_it(sweep, tmp_path, monkeypatch):
    """The cells of a card, its page beside a stored card, and the jobs that are not done."""
    monkeypatch.setattr("lab.sweeps.card.STORED", tmp_path)
    cells = {("basic", "easy", "0.0001"): (0.3, 0.5), ("basic", "easy", "0.0005"): (0.7, 0.9),
             ("staleness", "easy", "0.0005"): (0.6, 0.7), ("noise", "easy", "0.0005"): (0.5,),
             ("staleness", "hard", "0.0005"): (0.2, 0.3)}  # fmt: skip
    for (row, level, rate), scores in cells.items():
        for seed, score in enumerate(scores):
            play(sweep, job(row, level, rate, seed), 0.2 + seed / 10, score)
    stored = [Cell("basic", "easy", 1e-3, [0.1, 0.3], [0.05, 0.07], 30.0)]
    stored += [
        Cell("staleness", x, 1e-3, [0.3] * 3, [0.8, 0.81, 0.79], 50) for x in ("easy", "hard")
    ]
    cispo, rows = Card("cispo", "2020-01-02", "abc", 3.25, stored), read_rows(ROWS)
    card = card_of("mine", sweep.records().values(), ["loss=mine"], rows)
    texts = [write_page(tmp_path / "cispo.html", cispo, [card], rows)]
    texts.append(write_page(tmp_path / "page.html", card, read_cards(tmp_path), rows))
    jobs = [["seed=0", f"row={row}", f"card.level={level}", "loss=mine"]
            for row in ("basic", "staleness", "noise", "memory")
            for level in ("easy", "hard")]  # fmt: skip
    ladder, others = split_jobs(jobs, [1e-4, 5e-4])
    page = re.sub(r"<style>.*</style>", "", (tmp_path / "page.html").read_text(), flags=re.S)
    found = {
        "card": msgspec.to_builtins(card)
        | {"day": "", "rate": card.rate, "ladder": card.score_by_rate},
        "intervals": [card.interval(row) for row in (*rows, "none")],
        "texts": texts, "page": page.replace(card.day, "").splitlines(), "jobs": [ladder, others],
        "left": [remaining_work(sweep, some) for some in (ladder, others, [*ladder, *others])],
        "other": card_of_ended_jobs("x", sweep, [[*jobs[0], "kl=k3"]]).name,
    }  # fmt: skip
    golden("sweeps/card", without(tmp_path, found))
