"""Runs as the report reads them, the arms that they form, the page, and its command line."""

import fcntl
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml

from lab.report.arms import arms_of
from lab.report.command import main
from lab.report.comparison import compare
from lab.report.curves import curves
from lab.report.evaluations import read_evaluation
from lab.report.forest import forest
from lab.report.numbers import as_json
from lab.report.page import render
from lab.report.run import Run
from lab.report.sources import read_sources
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import (
    NUM_QUESTIONS,
    made_arm,
    made_run,
    made_sweep,
    write_evaluation,
)
from tests.support.golden import golden, without

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
        (["nowhere", "."], 2, "nowhere is not a folder: give the folder of a sweep or of a run"),
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


def read(*paths):
    return read_sources(paths).runs


def test_unfinished_runs_have_a_cause(tmp_path):
    made_run(tmp_path / "runs" / "reached", steps=7, max_steps=20, stop_when="step > 5")
    for name, steps in (("going", 8), ("failed", 3)):
        made_run(tmp_path / "runs" / name, "loss=cispo", steps=steps, max_steps=20)
    made_run(tmp_path / "runs" / "unevaluated", "loss=ppo", evaluations={10: [0.5]})
    failed = RunFolder(tmp_path / "runs" / "failed")
    failed.failures.mkdir()
    report = {"part": "inference", "time": 1.0, "message": "vLLM \udc80is\x07 gone\nand more"}
    (failed.failures / "inference.json").write_text(json.dumps(report))
    sweep = made_sweep(tmp_path / "sweep", sorted((tmp_path / "runs").iterdir()))
    with open(tmp_path / "runs" / "going" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = read(sweep)
    assert {run.name: run.cause for run in runs} == {
        "reached": "",
        "unevaluated": "stopped after step 20 of 20, before its evaluation",
        "going": "still going: step 8 of 20",
        "failed": "inference: vLLM ?is gone",
    }


def test_a_job_that_failed_before_its_folder_existed_is_not_lost_and_keeps_its_seed(tmp_path):
    folders = made_arm(tmp_path / "runs", "loss=grpo", seeds=3)
    sweep = made_sweep(tmp_path / "sweep", folders)
    refused = {"overrides": ["loss=grpo", "seed=7"], "error": "no such key"}
    for number, folder in enumerate([None, str(tmp_path / "runs" / "refused")], 97):
        job = json.dumps(refused | {"folder": folder})
        (sweep / "jobs" / f"000{number}.json").write_text(job)
    gone = {"overrides": ["loss=grpo", "seed=8"], "error": None, "folder": str(tmp_path / "gone")}
    (sweep / "jobs" / "00099.json").write_text(json.dumps(gone))
    (grpo,) = arms_of(read(sweep))
    assert [run.seed for run in grpo.runs if not run.finished] == ["7", "7", "8"]
    assert [run.name for run in grpo.ended_early] == ["gone"]  # it was done and is deleted
    comparison = compare([grpo])
    assert [run.name for run in comparison.baseline.lost] == ["gone"]
    repeated = replace(grpo.runs[0], seed=8)
    assert not replace(grpo, runs=(*grpo.runs, repeated)).ended_early


def test_a_run_that_was_resumed_outside_its_sweep_is_finished_and_its_other_jobs_are_lost(tmp_path):
    folders = [made_run(tmp_path / str(s), seed=s, steps=9 + s, max_steps=10) for s in (0, 1)]
    sweep = made_sweep(tmp_path / "sweep", folders)
    for path in (sweep / "jobs").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"error": "vLLM is gone"}))
    assert [run.cause for run in read(sweep)] == ["vLLM is gone", ""]


def test_evaluations_and_prompt_searches_beside_runs_are_not_runs_that_ended_early(tmp_path):
    made_run(tmp_path / "run")
    made_run(tmp_path / "evaluate", steps=0, max_steps=1)
    RunFolder(tmp_path / "evaluate").evaluated.write_text("")
    assert [run.name for run in read(tmp_path)] == ["run"]


def test_runs_that_were_moved_together_with_their_sweep_are_found(tmp_path):
    folders = made_arm(tmp_path / "lab" / "outputs", "loss=grpo", seeds=2)
    made_sweep(tmp_path / "lab" / "sweeps" / "x", folders)
    before = read(tmp_path / "lab" / "sweeps" / "x")
    moved = (tmp_path / "lab").rename(tmp_path / "moved")
    after = read(moved / "sweeps" / "x")
    assert [run.name for run in after] == [run.name for run in before]
    assert all(run.finished and moved in run.folder.parents for run in after)


def test_broken_files_are_counted_and_the_rest_is_read(tmp_path):
    folders = made_arm(tmp_path / "runs", "loss=dapo", seeds=2)
    folder = RunFolder(folders[0])
    with folder.metrics.open("a") as file:
        file.write('{"step": 21, "train/rew\n')
    evaluation = folder.evaluation_of(20)
    broken = evaluation.read_bytes().replace(b"reverse 3", b"reverse \xff3", 1)
    evaluation.write_bytes(broken + b"not json\n")
    folder.config.write_text("a: [")
    sweep = made_sweep(tmp_path / "sweep", folders)
    (sweep / "jobs" / "00099.json").write_text("{half")
    (sweep / "sweep.json").write_text("[]")
    RunFolder(folders[1]).evaluation_of(20).unlink()
    RunFolder(folders[1]).evaluation_of(20).mkdir()
    sources = read_sources([sweep, *folders, tmp_path / "runs", tmp_path / "nowhere"])
    # Without max_steps, nothing shows that the run is complete.
    assert [run.cause for run in sources.runs] == ["stopped after step 20 of 21", ""]
    assert sources.runs[1].evaluations[20].num_broken == 1
    assert len(sources.runs) == 2  # a run that is named twice counts once
    read_again = sources.runs[0].evaluations[20]
    assert read_again.num_broken == 2
    assert len(read_again.scores) == NUM_QUESTIONS  # question 3 has another rollout
    assert "Unreadable files in" in sources.notes[0]
    assert "nowhere holds neither a sweep" in sources.notes[1]


def named(override, settings):
    """Return two runs, as name, override, seed and settings. "{}" is the name of the run."""
    return [
        (name, override.format(name), 0, json.loads(json.dumps(settings).replace("{}", name)))
        for name in ("constant", "linear")
    ]


@pytest.mark.parametrize(
    ("runs", "sizes"),
    [
        # Runs that are named after the value that they vary, also if a config file sets it
        (named("loss={}", {"loss": {"_target_": "losses.{}.{}"}}), [1, 1]),
        (named("optim.schedule={}", {"optim": {"schedule": "{}"}}), [1, 1]),
        (named("env={}", {"env": {"path": "openai/{}"}}), [1, 1]),
        (named("experiment={}", {"strategy": {"at": "{}"}}), [1, 1]),
        (named("a=1", {"optim": {"schedule": "{}"}}), [1, 1]),
        # Values that contain the name of the run
        ([(f"s{x}", "a=1", x, {"log": f"s{x}", "cache": f"/tmp/s{x}/x"}) for x in range(3)], [3]),
        # Nested seeds: of the user, and of two files whose seeds are also seeds of runs
        ([(f"d{x}", f"env.args.seed={x}", 0, {"env": {"args": {"seed": x}, "seed": 0}})
          for x in (1, 2)], [1, 1]),
        ([(f"{x}-{seed}", f"env=d{x}", seed, {"env": {"seed": x, "order": {"seed": seed}}})
          for x in (1, 2) for seed in range(3)], [3, 3]),
    ],
)  # fmt: skip
def test_runs_are_one_arm_if_their_settings_differ_in_names_and_seeds_alone(runs, sizes, tmp_path):
    for name, override, seed, settings in runs:
        made_run(tmp_path / name, override, seed=seed, choice=None, **settings)
    assert [len(arm.runs) for arm in arms_of(read(tmp_path))] == sizes


def test_a_run_says_whether_its_examples_were_chosen_by_rewards_and_when_its_sweep_got_it(tmp_path):
    learned = ({"selects_examples": False}, {"selects_examples": True})
    folders = [made_run(tmp_path / str(i), seed=i, learned=one) for i, one in enumerate(learned)]
    sweep = made_sweep(tmp_path / "sweep", folders)
    record = json.loads((sweep / "jobs" / "00001.json").read_text())
    (sweep / "jobs" / "00001.json").write_text(json.dumps({**record, "grown": 1}))
    assert [(run.grown, run.selects_examples) for run in read(sweep)] == [(0, False), (1, True)]
    assert arms_of(read(sweep))[0].num_looks == 2


def test_only_what_no_policy_can_change_identifies_a_question(tmp_path):
    """The system prompt may differ between runs, and later messages answer the policy."""
    folder, said = RunFolder(tmp_path), {"role": "assistant", "content": "4"}
    asked, other = ({"role": "user", "content": text} for text in ("2 + 2?", "2 + 3?"))
    talks = [[asked], [asked, said, other], [{"role": "system", "content": "Be brief"}, asked]]
    talks += [[asked, other], [other]]
    lines = [json.dumps({"example": 0, "env": "x", "messages": talk}) for talk in talks]
    digests = []
    for version, line in enumerate(lines):
        folder.evaluation_of(version).write_text(line)
        (question,) = read_evaluation(folder, version).rewards
        digests.append(question.digest)
    assert len(set(digests[:3])) == 1
    assert len(set(digests[2:])) == 3


def test_a_rollout_that_failed_before_its_first_turn_does_not_rename_its_question(tmp_path):
    """An environment that controls its conversation had not yet written its own prompt."""
    folder, questions = RunFolder(tmp_path), []
    for version, texts in enumerate((["find a", "a", "find a"], ["a", "find a", "a"])):
        talks = [[{"role": "user", "content": text}] for text in texts]
        lines = [
            {"messages": t, "reward": 1.0 if len(t[0]["content"]) > 1 else None} for t in talks
        ]
        folder.evaluation_of(version).write_text("\n".join(map(json.dumps, lines)))
        questions += read_evaluation(folder, version).rewards
    assert len(questions) == 2
    assert len(set(questions)) == 1


def run(name, *overrides, commit="", **config) -> Run:
    return Run(name=name, overrides=overrides, config=config, commit=commit)


def test_the_name_of_an_arm_is_as_short_as_the_others_allow():
    for arms, names in (
        ([["loss=grpo"], ["loss=cispo"]], ["grpo", "cispo"]),
        ([["optim.learning_rate=0.1"], ["optim.learning_rate=0.2"]],
         ["learning_rate=0.1", "learning_rate=0.2"]),
        ([["kl=null"], ["kl=k3"]], ["kl=null", "kl=k3"]),
        ([["loss=grpo", "kl=k3"], ["loss=cispo", "kl=k3"]], ["grpo", "cispo"]),
        ([["kl=k3", "loss.clip=1"], ["kl=k2", "loss.clip=1"], ["kl=k2", "loss.clip=2"]],
         ["k3 clip=1", "k2 clip=1", "k2 clip=2"]),
        ([["loss=grpo"], []], ["loss=grpo", "(defaults)"]),
        ([["a.x=1", "b.x=1"], ["a.x=2", "b.x=2"]], ["a.x=1 b.x=1", "a.x=2 b.x=2"]),
    ):  # fmt: skip
        assert [arm.name for arm in arms_of([run("r", *overrides) for overrides in arms])] == names


def test_a_setting_that_a_later_commit_added_makes_no_new_arm():
    """A sweep was resumed after an update of this code."""
    runs = []
    for commit, added in (("old", {}), ("new", {"listen": "unix"})):
        for loss in ("grpo", "cispo"):
            runs.append(run(f"{loss} {commit}", f"loss={loss}", commit=commit, loss=loss, **added))
    runs.append(run("tcp", "loss=grpo", "listen=tcp", commit="new", loss="grpo", listen="tcp"))
    names = sorted([one.name for one in arm.runs] for arm in arms_of(runs))
    assert names == [["cispo old", "cispo new"], ["grpo old", "grpo new"], ["tcp"]]


@pytest.mark.parametrize("order", [1, -1])
def test_a_setting_that_two_later_commits_do_not_share_separates_them(order):
    added = [("a", {}), ("b", {"clip": 1}), ("c", {"clip": 2}), ("d", {"clip.high": 2})]
    runs = [run(commit, "loss=mine", commit=commit, x=1, **more) for commit, more in added[::order]]
    together = [{one.name for one in arm.runs} for arm in arms_of(runs)]
    assert sum(map(len, together)) == 4
    assert all(len(names & {"b", "c", "d"}) <= 1 for names in together)


def test_arms_are_named_by_differing_settings_and_no_two_arms_share_a_name():
    runs = []
    for index, last in enumerate((1, 2, 3, 3)):
        first = min(index + 1, 3) // 3  # 0, 0, 1, 1
        runs.append(run(f"r{index}", a=first, b=first, c=first, d=last, e=index))
    runs += [run(f"grpo{f}", "loss=grpo", a=0, b=0, c=0, d=5, e=6, f=f) for f in (7, 8)]
    labels = [arm.label for arm in arms_of(runs)]
    assert len(set(labels)) == 6
    assert {"loss=grpo f=7", "loss=grpo f=8"} <= set(labels)


def test_arms_whose_cut_names_would_be_equal_get_numbers():
    words = [["x=" + "a" * 30 + middle + "b" * 30] for middle in "123"]
    names = [arm.name for arm in arms_of([run("r", *overrides) for overrides in words])]
    assert [name[-3:] for name in names] == ["(1)", "(2)", "(3)"]
