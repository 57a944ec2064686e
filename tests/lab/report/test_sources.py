"""Runs as they are read from their folders, whole and broken."""

import fcntl
import json
from dataclasses import replace

import pytest

from lab.report.arms import arms_of
from lab.report.comparison import compare
from lab.report.evaluations import read_evaluation
from lab.report.run import COPIED_SEED
from lab.report.sources import read_sources
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import NUM_QUESTIONS, made_arm, made_run, made_sweep


def read(*paths):
    return read_sources(paths).runs


def test_unfinished_runs_have_a_cause(tmp_path):
    made_run(tmp_path / "runs" / "reached", steps=7, max_steps=20, stop_when="step > 5")
    for name, steps in (("stopped", 7), ("going", 8), ("failed", 3)):
        made_run(tmp_path / "runs" / name, "loss=cispo", steps=steps, max_steps=20)
    made_run(tmp_path / "runs" / "unevaluated", "loss=ppo", evaluations={10: [0.5]})
    failed = RunFolder(tmp_path / "runs" / "failed")
    failed.failures.mkdir()
    report = {"part": "inference", "time": 1.0, "message": "vLLM \udc80is\x07 gone\nand more"}
    (failed.failures / "inference.json").write_text(json.dumps(report))
    sweep = made_sweep(tmp_path / "sweep", sorted((tmp_path / "runs").iterdir()))
    job = {"overrides": ["loss=ppo", "seed=0"], "folder": None, "error": "no such model"}
    (sweep / "jobs" / "00099.json").write_text(json.dumps(job))
    with open(tmp_path / "runs" / "going" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = read(sweep)
    assert {run.name: run.cause for run in runs} == {
        "reached": "",
        "stopped": "stopped after step 7 of 20",
        "unevaluated": "stopped after step 20 of 20, before its evaluation",
        "going": "still going: step 8 of 20",
        "failed": "inference: vLLM ?is gone",
        "loss=ppo seed=0": "no such model",
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
    assert not any("not ended" in note for note in comparison.notes)
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


def test_runs_with_the_name_of_their_loss_are_separate_arms(tmp_path):
    for loss in ("grpo", "cispo"):
        made_run(
            tmp_path / loss, f"loss={loss}", loss={"_target_": f"losses.{loss}.{loss}"},
            cache=f"/tmp/{loss}/cache", shown_as=f"lab-{loss}",
        )  # fmt: skip
    arms = arms_of(read(tmp_path))
    assert [arm.name for arm in arms] == ["cispo", "grpo"]
    differing = set(arms[0].runs[0].config) - {"choice"}
    assert differing == {"loss._target_", "max_steps"}  # no value that contains the run's name


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("optim.schedule", ("optim", "schedule", "{}")),
        ("env", ("env", "path", "openai/{}")),
        ("experiment", ("strategy", "at", "{}")),
    ],
)
def test_runs_that_are_named_after_the_value_that_they_vary_are_separate_arms(
    tmp_path, key, setting
):
    group, option, value = setting
    for name in ("constant", "linear"):
        settings = {group: {option: value.format(name)}, "choice": None}
        made_run(tmp_path / name, f"{key}={name}", **settings)
    assert [arm.name for arm in arms_of(read(tmp_path))] == ["constant", "linear"]


def test_runs_that_are_named_after_a_value_of_a_config_file_are_separate_arms(tmp_path):
    for name in ("constant", "linear"):
        made_run(tmp_path / name, optim={"schedule": name}, choice=None)
    assert [arm.name for arm in arms_of(read(tmp_path))] == ["constant", "linear"]
    for seed in range(3):  # here the value is named after the run: logger.name=${run_name}
        made_run(tmp_path / "seeds" / f"s{seed}", seed=seed, logger={"name": f"s{seed}"})
    assert [len(arm.runs) for arm in arms_of(read(tmp_path / "seeds"))] == [3]


def test_a_run_says_whether_its_examples_were_chosen_by_rewards_and_when_its_sweep_got_it(tmp_path):
    learned = ({"selects_examples": False}, {"selects_examples": True})
    folders = [made_run(tmp_path / str(i), seed=i, learned=one) for i, one in enumerate(learned)]
    sweep = made_sweep(tmp_path / "sweep", folders)
    record = json.loads((sweep / "jobs" / "00001.json").read_text())
    (sweep / "jobs" / "00001.json").write_text(json.dumps({**record, "grown": 1}))
    assert [(run.grown, run.selects_examples) for run in read(sweep)] == [(0, False), (1, True)]
    assert arms_of(read(sweep))[0].num_looks == 2


def test_a_nested_seed_that_the_user_sets_makes_arms(tmp_path):
    for seed in (1, 2):
        given = f"env.args.seed={seed}"
        env = {"args": {"seed": seed}, "seed": 0}
        made_run(tmp_path / f"data{seed}", given, seed=0, env=env, choice=None)
    arms = arms_of(read(tmp_path))
    assert [arm.name for arm in arms] == ["seed=1", "seed=2"]
    assert arms[0].runs[0].config["env.seed"] == COPIED_SEED


def test_files_of_one_group_that_differ_in_a_nested_seed_are_arms_of_all_seeds(tmp_path):
    """The seeds of the data are 1 and 2, which are also seeds of runs."""
    for data in (1, 2):
        for seed in range(3):
            env = {"seed": data, "order": {"seed": seed}}
            made_run(tmp_path / f"{data}-{seed}", f"env=d{data}", seed=seed, env=env, choice=None)
    arms = arms_of(read(tmp_path))
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("d1", 3), ("d2", 3)]


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
