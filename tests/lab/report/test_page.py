"""The page: its content, how a browser draws it, and its command line."""

import json
import re

import numpy as np
import pytest
import yaml

from lab.report.arms import arms_of
from lab.report.command import main
from lab.report.comparison import compare
from lab.report.curves import curves
from lab.report.forest import forest
from lab.report.numbers import as_json
from lab.report.page import render
from lab.report.sources import read_sources
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import made_arm, made_run, made_sweep, write_evaluation
from tests.support.golden import golden
from tests.support.outcomes import without

HOSTILE = "x\x07</script><script>alert(1)</script>"
CLEANED = HOSTILE.replace("\x07", "")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    for loss, gain in (("grpo", 0.0), ("cispo", 0.2)):
        made_arm(root / "runs", f"loss={loss}", gain=gain, seeds=3, loss=loss)
    for seed in range(3):
        scores = {20: [0.5 + seed / 50] * 16}
        made_run(root / "runs" / f"odd{seed}", f"loss={HOSTILE}", seed=seed, evaluations=scores)
    made_run(root / "runs" / "half", "loss=cispo", steps=4, max_steps=20, loss="cispo")
    made_run(root / "runs" / "unevaluated", "loss=cispo", loss="cispo")
    folder = made_sweep(root / "sweep", sorted((root / "runs").iterdir()), f"Which? {HOSTILE}")
    assert main([str(folder), "baseline=grpo"]) == 0
    return folder


def test_the_page_loads_nothing_and_all_files_have_escaped_names(sweep):
    text = (sweep / "report.html").read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"(src|href)=.?http", outside)
    assert CLEANED not in text
    assert "\x07" not in text  # a control character could crash the program that draws the charts
    assert "default-src 'none'" in text
    arms = json.loads((sweep / "report.json").read_text())["arms"]
    assert {arm["run"] for arm in arms} == {"loss=grpo", "loss=cispo", f"loss={CLEANED}"}
    names = {path.name for path in (sweep / "figures").iterdir()}
    assert names == {"forest.png", "forest.svg", "curves.png", "curves.svg"}
    assert (sweep / "figures" / "forest.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["nowhere", "out=x.html"], 1, ""),
        (["x=y"], 2, "x=y: the key x does not exist; choose from baseline, judged, out"),
        ([".", "judged=0"], 2, "judged=0: give the number"),
        ([".", "out=a/sweep.html"], 2, "would overwrite sweep.json: choose another name"),
        ([".", "out=summary.html"], 2, "would overwrite summary.json"),
        ([".", "out=versions.html"], 2, "would overwrite versions.json"),
        ([".", "until.smallest_effect=0.0"], 2, "effect=0.0: give a difference above 0, such as"),
    ],
)
def test_bad_arguments_are_refused_with_the_remedy(arguments, status, problem, capsys):
    assert main(arguments) == status
    assert problem in capsys.readouterr().err


def test_the_options_and_else_the_first_sweep_determine_the_comparison(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("lab.report.command.show", lambda *given: shown.append(given) or True)
    folders = []
    for name, effect in (("bare", None), ("first", 0.25), ("second", 0.5)):
        runs = [made_run(tmp_path / f"{name}-{x}", x, evaluations={20: [0.5]}) for x in "ab"]
        # A folder whose name contains "=" is no option.
        folders.append(made_sweep(tmp_path / f"x={name}", runs, "" if name == "bare" else name))
        if effect:
            info = json.loads((folders[-1] / "sweep.json").read_text())
            rule = {"smallest_effect": effect, "baseline": "b" if name == "first" else "a"}
            (folders[-1] / "sweep.json").write_text(json.dumps(info | rule))
    words = [str(folder) for folder in folders]
    for more, effect in ([], 0.25), (["until.smallest_effect=1e-2", "baseline=a"], 0.01):
        assert main([*words, *more]) == 0
        comparison, page, command = shown.pop()
        assert (comparison.smallest_effect, comparison.question) == (effect, "first")
        assert comparison.baseline.arm.name == ("a" if more else "b")
        assert (page, command) == (folders[0] / "report.html", "python train.py --multirun "
                                   "hydra.sweep.dir=x")  # fmt: skip


def test_a_folder_that_cannot_be_written_is_reported_below_the_conclusion(tmp_path, capsys):
    made_run(tmp_path / "run", "loss=grpo", reward=0.25)
    (tmp_path / "file").write_text("")  # where a folder would have to be
    assert main([str(tmp_path), f"out={tmp_path}/file/report.html"]) == 1
    told = capsys.readouterr().out
    assert told.index("scores 0.250") < told.index("not all files are written")


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
def whole(tmp_path_factory):
    return whole_sweep(tmp_path_factory.mktemp("golden"))


def text_of(page):
    """Return what a reader sees of a page, one line per element."""
    body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S).partition("<body>")[2]
    lines = (" ".join(line.split()) for line in re.sub(r"<[^>]*>", "\n", body).splitlines())
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "<time>", "\n".join(filter(None, lines)))


def charts(specs):
    """Return the charts without the numbers that Altair gives to views of one process."""
    return json.loads(re.sub(r"(view|param)_\d+", r"\1", json.dumps(specs)))


def test_the_command_prints_and_writes_all_numbers_of_a_sweep(whole, capsys, monkeypatch):
    """The printed text, report.json, the page and its charts, with judged=2."""
    monkeypatch.setenv("COLUMNS", "150")
    assert main([str(whole), "judged=2", "baseline=loss=grpo"]) == 0
    folder, page = whole.parent, (whole / "report.html").read_text()
    golden("report/printed", capsys.readouterr().out.replace(str(folder), "<folder>"))
    golden("report/numbers", without(folder, json.loads((whole / "report.json").read_text())))
    golden("report/page", text_of(page).replace(str(folder), "<folder>"))
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', page, re.S)[1])
    golden("report/charts", charts(without(folder, specs)))


@pytest.mark.parametrize(("kind", "effect"), [("sequential", 0.1), ("training", 0.0)])
def test_the_other_kinds_of_reports(kind, effect, whole, tmp_path):
    """A sequential report of the last evaluations, and one of runs without evaluations."""
    folder = whole if effect else whole_sweep(tmp_path, is_evaluated=False)
    sources = read_sources([folder])
    options = {"question": sources.question, "smallest_effect": effect, "notes": sources.notes}
    one = compare(arms_of(sources.runs), baseline="cispo", **options)
    specs = {"forest": forest(one).to_dict(validate=False), "curves": curves(one)}
    page = text_of(render(one, specs, "python train.py --multirun")).splitlines()
    found = {"numbers": json.loads(as_json(one)), "page": page}
    found |= {"forest": charts(specs["forest"])}
    golden(f"report/{kind}", without(folder.parent, found))


def test_every_run_as_the_report_reads_it(whole):
    """Each field of a run: settings, curves, evaluations, cause, commit, code, command."""
    found = {}
    for run in read_sources([whole], 2).runs[::3]:
        fields, names = dict(vars(run)), ("finished", "is_open", "ended_early", "training_reward")
        fields |= {name: vars(fields[name]) for name in ("held_out", "training")}
        fields["evaluations"] = {
            version: [[*vars(question).values(), x] for question, x in one.scores.items()][::5]
            for version, one in run.evaluations.items()
        }
        judged = [run.judged_versions(number) for number in (1, 2, 3)]
        more = {"judged": judged, "smoothed": run.training.smoothed(3).scores[:6]}
        found[run.name] = fields | {name: getattr(run, name) for name in names} | more
    golden("report/runs", without(whole.parent, found))
