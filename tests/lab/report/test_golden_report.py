"""Everything that a report shows of a sweep with as many cases as possible, as stored files."""

import csv
import json
import re
from math import inf, nan

import numpy as np
import pytest
import yaml

from lab.report import power, sequential
from lab.report import statistics as st
from lab.report.arms import arms_of
from lab.report.command import main
from lab.report.comparison import compare
from lab.report.conclusion import basis, conclusion, describe_power, headline
from lab.report.curves import curves
from lab.report.forest import forest
from lab.report.numbers import arm_records, as_csv, as_json, table
from lab.report.page import render
from lab.report.sources import read_sources
from rl.runtime.folder import RunFolder
from tests.support import compared_runs as made
from tests.support.finished_runs import made_run, made_sweep, write_evaluation
from tests.support.golden import golden
from tests.support.outcomes import numbers_in, without

# loss -> difference to grpo after 20 steps, and the number of seeds
ARMS = {"grpo": (0.0, 5), "cispo": (0.2, 5), "dapo": (-0.2, 4), "gspo": (0.05, 6), "dppo": (0.3, 2)}


def play(root, loss, seed, steps=20, is_evaluated=True):
    """Write a run whose rewards, durations and tokens change from step to step."""
    rng, gain = np.random.default_rng([seed, *map(ord, loss)]), ARMS[loss][0]
    last = 0.4 + gain / 2 + rng.normal(0, 0.02) + rng.normal(0, 0.03, 16)
    scores = {v: 0.3 + (last - 0.3) * v / 20 for v in (0, 10, 20) if v <= steps and is_evaluated}
    about = {"loss": {"_target_": f"losses.{loss}.{loss}", "clip": gain}, "env": {"seed": seed}}
    options = {"seed": seed, "steps": steps, "max_steps": 20, "evaluations": scores}
    run = RunFolder(made_run(root / "runs" / f"{loss}-s{seed}", f"loss={loss}", **options, **about))
    for version in scores:  # the questions of a second environment
        path = run.evaluation_of(version)
        lines = path.read_text()
        write_evaluation(run, version, [min(0.2 + gain + version / 50, 1.0)] * 4, "add")
        lines = [json.loads(line) for line in f"{lines}{path.read_text()}".splitlines()]
        for line in lines[seed::9] if loss == "gspo" else ():
            line["reward"] = None
        broken = "{broken\n" * (loss == "gspo")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + broken)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in (row for row in rows if "train/reward" in row):
        step = row["step"]
        row["train/reward"] = 0.3 + (gain + 0.2) * step / 20 + 0.01 * seed * (step % 3)
        row |= {"train/tokens": 100.0 + 10 * step, "time/step": 2.0 + step % 3}
        row["rollout/errors"] = 0.1 * (step % 2)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = yaml.safe_load(run.overrides.read_text())
    commit = "b" * 40 + "+uncommitted" if loss == "gspo" else "a" * 40
    run.overrides.write_text(yaml.safe_dump(record | {"commit": commit}))
    (run.code / "step_000000").mkdir(parents=True)
    (run.code / "step_000000" / "mine.py").write_text(f"# {loss == 'dapo'}")
    if loss == "dapo":
        run.set_model("/runs/first/checkpoints/step_000005/hf")
    return run


def whole_sweep(root, **options):
    """Write runs that ended, failed, stopped or never began, two of them after the sweep grew."""
    runs = [play(root, loss, s, **options) for loss, (_, num) in ARMS.items() for s in range(num)]
    runs += [play(root, "cispo", 5, steps=4), play(root, "dapo", 4, steps=12)]
    runs[-2].failures.mkdir()
    failure = {"part": "trainer", "time": 1.0, "message": "out of memory\nand more"}
    (runs[-2].failures / "trainer.json").write_text(json.dumps(failure))
    sweep = made_sweep(root / "sweep", [run.path for run in runs], "Which loss?")
    for path in sorted((sweep / "jobs").iterdir())[19:21]:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"grown": 1}))
    for number, (loss, error) in enumerate((("dapo", "no such key"), ("grpo", "not started")), 90):
        job = {"overrides": [f"loss={loss}", "seed=9"], "folder": None, "error": error}
        (sweep / "jobs" / f"{number:05d}.json").write_text(json.dumps(job))
    (sweep / "jobs" / "00099.json").write_text("{half")
    return sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return whole_sweep(tmp_path_factory.mktemp("golden"))


def text_of(page):
    """Return what a reader sees of a page, one line per element."""
    body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S).partition("<body>")[2]
    lines = (" ".join(line.split()) for line in re.sub(r"<[^>]*>", "\n", body).splitlines())
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "<time>", "\n".join(filter(None, lines)))


def rows_of(text):
    return [numbers_in(row) for row in csv.reader(text.splitlines())]


def charts(specs):
    """Return the charts without the numbers that Altair gives to views of one process."""
    return json.loads(re.sub(r"(view|param)_\d+", r"\1", json.dumps(specs)))


def test_the_command_prints_and_writes_all_numbers_of_a_sweep(sweep, capsys, monkeypatch):
    """The printed text, report.json, report.csv, the page and its charts, with judged=2."""
    monkeypatch.setenv("COLUMNS", "150")
    assert main([str(sweep), "judged=2", "baseline=loss=grpo"]) == 0
    folder, page = sweep.parent, (sweep / "report.html").read_text()
    golden("report/printed", capsys.readouterr().out.replace(str(folder), "<folder>"))
    golden("report/numbers", without(folder, json.loads((sweep / "report.json").read_text())))
    golden("report/runs_csv", without(folder, rows_of((sweep / "report.csv").read_text())))
    golden("report/page", text_of(page).replace(str(folder), "<folder>"))
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', page, re.S)[1])
    golden("report/charts", charts(without(folder, specs)))


@pytest.mark.parametrize(("kind", "effect"), [("sequential", 0.1), ("training", 0.0)])
def test_the_other_kinds_of_reports(kind, effect, sweep, tmp_path):
    """A sequential report of the last evaluations, and one of runs without evaluations."""
    folder = sweep if effect else whole_sweep(tmp_path, is_evaluated=False)
    sources = read_sources([folder])
    options = {"question": sources.question, "smallest_effect": effect, "notes": sources.notes}
    one = compare(arms_of(sources.runs), baseline="cispo", **options)
    specs = {"forest": forest(one).to_dict(validate=False), "curves": curves(one)}
    page = text_of(render(one, specs, "python train.py --multirun")).splitlines()
    found = {"numbers": json.loads(as_json(one)), "csv": rows_of(as_csv(one)), "page": page}
    found |= {"forest": charts(specs["forest"])}
    golden(f"report/{kind}", without(folder.parent, found))


def test_every_run_as_the_report_reads_it(sweep):
    """Each field of a run: settings, curves, evaluations, cause, commit, code, command."""
    found = {}
    for run in read_sources([sweep], 2).runs[::3]:
        fields, names = dict(vars(run)), ("finished", "is_open", "ended_early", "training_reward")
        fields |= {name: vars(fields[name]) for name in ("held_out", "training")}
        fields["evaluations"] = {
            version: [[*vars(question).values(), x] for question, x in one.scores.items()][::5]
            for version, one in run.evaluations.items()
        }
        judged = [run.judged_versions(number) for number in (1, 2, 3)]
        more = {"judged": judged, "smoothed": run.training.smoothed(3).scores[:6]}
        found[run.name] = fields | {name: getattr(run, name) for name in names} | more
    golden("report/runs", without(sweep.parent, found))


LONG = "a-loss-with-a-long-name"
COMPARED = {
    "one arm": [made.arm("grpo", made.scores(0))],
    "few seeds": [made.arm(n, made.scores(i, i / 9, i + 1)) for i, n in enumerate("abc")],
    "each decision": [made.arm(n, made.scores(i, (0, 0.2, -0.2, 0.004, 0.1)[i], 9))
                      for i, n in enumerate("abcde")],
    "many": [made.arm(f"{LONG}-{i}", made.scores(i, i / 50 - 0.1)) for i in range(9)],
    "long baseline": [made.arm(LONG * 4, made.scores(0)), made.arm("b", made.scores(1, 0.2))],
    "equal scores": [made.arm(n, [[0.5] * 4] * 3) for n in "ab"],
    "rewards": [made.arm(n, rewards=(0.1 + i / 2, 0.2 + i / 2, 0.3)) for i, n in enumerate("ab")],
}  # fmt: skip


def test_the_sentences_about_small_and_large_comparisons():
    """Headline, basis, power, notes and table of seven comparisons, with and without an effect."""
    found = {}
    for name, arms in COMPARED.items():
        for effect in (0.0, 0.03):
            one = compare(arms, smallest_effect=effect, num_draws=2000)
            texts = [headline(one), conclusion(one), basis(one), describe_power(one), *one.notes]
            found[f"{name}, effect {effect}"] = [texts, table(arm_records(one, one.arms))]
    golden("report/sentences", found)


def test_the_statistics_of_fixed_scores_and_of_edge_cases():
    """Variances, p-values, power, intervals and decisions, also at their limits."""
    strata = np.array([0] * 10 + [1] * 6)
    y = [st.Scores(np.array(made.scores(i, i / 40, 4 + i)), strata) for i in range(3)]
    spreads = [st.spread_of(one, base) for one in (*y, y[0].first(2)) for base in (None, y[0])]
    spreads += [st.Spread((), 0.0, 0.0, 0), st.Spread(((0.0, 3), (0.0, 3)), 0.0, 0.0, 2)]
    spreads += [spreads[3].with_seeds(9)]
    rng = np.random.default_rng(3)
    weights = st.seed_weights(4, rng, 500), st.question_weights(strata, rng, 500)
    draws = st.draw_scores(y[0], *weights)
    intervals = [
        st.Interval(0.1, 0.0, 0.2),
        st.Interval(0.1, nan, nan),
        st.Interval(-0.1, -1, -0.05),
    ]
    effects = [(-0.1, 0.1), (-0.11, 0.1), (0.0, 0.2), (0.01, 0.2), (-0.2, 0.0), (-0.2, -0.01)]
    golden("report/statistics", {
        "spreads": [[s.variance, s.degrees_of_freedom, s.decision_degrees_of_freedom, s.noise,
                     power.visible_difference(s, 6), power.seeds_needed(0.02, s, 4),
                     *(st.p_value(d, s) for d in (0.0, -0.03))] for s in spreads],
        "fewest": [power.fewest_seeds(lambda n, least=least: n >= least) for least in (1, 4, inf)],
        "interval": [vars(st.interval(0.5, d, s)) for d, s in
                     ((draws, spreads[0]), (draws, spreads[-3]), (draws * 0, spreads[0]))],
        "formats": [f"{one:+.2f} {abs(one):.2f}" for one in intervals],
        "decisions": [st.decide(one, p) for one in intervals for p in (0.049, 0.05, nan)],
        "looks": [st.looks_factor(number) for number in range(5)],
        "holm": st.adjust_by_holm([0.02, nan, 0.01, 0.6, 0.03]),
        "chance": st.chance_better(np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])),
        "middle": [st.interquartile_mean(np.arange(float(n))) for n in (1, 3, 4, 9)],
        "radii": [sequential.radius_of(s, 0.05, 0.025) for s in spreads[1:6:2]],
        "sequential": [str(sequential.decision_of(*ends, 0.1)) for ends in effects],
        "states": [[s.decision, vars(s.difference), s.error, s.seeds_needed]
                   for s in sequential.decide_arms(y, 0, 0.03, 1)],
    })  # fmt: skip
