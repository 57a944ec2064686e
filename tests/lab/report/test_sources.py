"""Runs as they are read from their folders, whole and broken, and the arms that they form."""

import fcntl
import json
from dataclasses import replace

import pytest

from lab.report.arms import arms_of
from lab.report.comparison import compare
from lab.report.evaluations import read_evaluation
from lab.report.run import Run
from lab.report.sources import read_sources
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import NUM_QUESTIONS, made_arm, made_run, made_sweep


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


@pytest.mark.parametrize(
    ("arms", "names"),
    [
        ([["loss=grpo"], ["loss=cispo"]], ["grpo", "cispo"]),
        ([["optim.learning_rate=0.1"], ["optim.learning_rate=0.2"]],
         ["learning_rate=0.1", "learning_rate=0.2"]),
        ([["kl=null"], ["kl=k3"]], ["kl=null", "kl=k3"]),
        ([["loss=grpo", "kl=k3"], ["loss=cispo", "kl=k3"]], ["grpo", "cispo"]),
        ([["kl=k3", "loss.clip=1"], ["kl=k2", "loss.clip=1"], ["kl=k2", "loss.clip=2"]],
         ["k3 clip=1", "k2 clip=1", "k2 clip=2"]),
        ([["loss=grpo"], []], ["loss=grpo", "(defaults)"]),
        ([["a.x=1", "b.x=1"], ["a.x=2", "b.x=2"]], ["a.x=1 b.x=1", "a.x=2 b.x=2"]),
    ],
)  # fmt: skip
def test_the_name_of_an_arm_is_as_short_as_the_others_allow(arms, names):
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
