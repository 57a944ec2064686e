"""Compared runs: the numbers computed again by other means, and what happens to missing data."""

import csv
import fcntl
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lab.report.arms import arms_of, short
from lab.report.charts import Canvas, forest
from lab.report.comparison import NothingToCompare, compare
from lab.report.conclusion import conclusion
from lab.report.page_facts import efficiency
from lab.report.scoring import HELD_OUT, TRAINING
from lab.report.sources import read_sources
from lab.report.statistics import UNCLEAR
from lab.report.summary import as_csv, as_record
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import (
    NUM_QUESTIONS,
    made_arm,
    made_run,
    made_sweep,
    write_evaluation,
)


def compared(*paths, num_judged=1, **keywords):
    sources = read_sources(paths, num_judged)
    keywords |= {"question": sources.question, "notes": sources.notes, "num_judged": num_judged}
    return compare(arms_of(sources.runs), **keywords)


def result(comparison, name):
    return next(one for one in comparison.results if one.arm.name == name)


def read_arms(*paths):
    return arms_of(read_sources(paths).runs)


def left_out(comparison):
    return {run.name: why for run, why in comparison.left_out}


def evaluation_lines(folder):
    return [json.loads(x) for x in RunFolder(folder).evaluation_of(20).read_text().splitlines()]


def last_rewards(folder):
    """Mean reward of every question at version 20."""
    rewards = [[] for _ in range(NUM_QUESTIONS)]
    for line in evaluation_lines(folder):
        rewards[line["example"]].append(line["reward"])
    return np.mean(rewards, axis=1)


def unscore(folder, is_unscored):
    lines = [x | ({"reward": None} if is_unscored(x) else {}) for x in evaluation_lines(folder)]
    RunFolder(folder).evaluation_of(20).write_text("".join(json.dumps(x) + "\n" for x in lines))


@pytest.fixture
def three_arms(tmp_path):
    """grpo, and one clearly better, and one like it."""
    for loss, gain in (("grpo", 0.0), ("cispo", 0.2), ("dapo", 0.0)):
        made_arm(tmp_path / "runs", f"loss={loss}", gain=gain)
    return tmp_path / "runs"


def test_the_numbers_are_those_of_the_files(three_arms):
    comparison = compared(three_arms, baseline="loss=grpo")
    cispo, grpo = result(comparison, "cispo"), result(comparison, "grpo")
    arm, base = (
        np.array([last_rewards(three_arms / f"loss-{loss}-s{seed}") for seed in range(5)])
        for loss in ("cispo", "grpo")
    )
    assert comparison.measure == HELD_OUT
    assert cispo.score.value == pytest.approx(arm.mean())
    assert cispo.difference.value == pytest.approx(arm.mean() - base.mean())
    assert cispo.chance_better == 1.0
    # Seeds differ by 0.02 and questions by next to nothing, so Welch's test has nearly the p.
    welch = stats.ttest_ind(arm.mean(1), base.mean(1), equal_var=False)
    assert 4 * welch.pvalue > cispo.p_value > welch.pvalue / 4
    reference = stats.bootstrap(
        (arm.mean(1), base.mean(1)), lambda x, y, axis: x.mean(axis) - y.mean(axis), rng=0
    ).confidence_interval
    drawn = cispo.difference.high - cispo.difference.low
    assert 0.8 < drawn / (reference.high - reference.low) < 1.7  # wider: five seeds are few
    assert grpo.decision == ""
    assert grpo.efficiency.steps <= 20
    assert cispo.efficiency.num_reached == 5
    # The curves go from 0.3 in a straight line.
    assert cispo.area == pytest.approx(np.mean([(0.3 + x.mean()) / 2 for x in arm]), abs=1e-6)


def test_the_conclusion_names_what_is_better_or_worse_and_what_cannot_be_told(three_arms):
    text = conclusion(compared(three_arms, baseline="grpo"))
    assert text.startswith("cispo (by 0.")
    assert (
        "beats grpo on 16 held-out questions, 5 seeds each; dapo cannot be told from grpo" in text
    )
    assert "smallest visible difference 0.0" in text
    reverse = compared(three_arms, baseline="cispo")
    assert {r.arm.name: r.decision for r in reverse.others} == {"grpo": "worse", "dapo": "worse"}
    assert "are worse than cispo" in conclusion(reverse)


def test_the_baseline_is_the_first_arm_that_was_run_and_the_numbers_repeat(three_arms, tmp_path):
    runs = sorted(three_arms.iterdir(), reverse=True)  # grpo first
    sweep = made_sweep(tmp_path / "sweep", runs, "Which loss?")
    comparison = compared(sweep)
    assert comparison.baseline.arm.label == "loss=grpo"
    assert comparison.question == "Which loss?"
    assert as_record(comparison) == as_record(compared(sweep))
    with pytest.raises(NothingToCompare, match="baseline= is one of loss=grpo, loss=dapo"):
        compared(sweep, baseline="loss=ppo")


def test_several_evaluations_are_averaged_on_request(three_arms):
    comparison = compared(three_arms, num_judged=2)
    run = result(comparison, "cispo").runs[0]
    at = [np.mean(list(run.evaluations[v].scores.values())) for v in (10, 20)]
    assert result(comparison, "cispo").scores.runs[0] == pytest.approx(np.mean(at))
    assert comparison.judged == "the last 2 evaluations, up to version 20"
    # Version 0 is untrained and never among the last.
    assert compared(three_arms, num_judged=3).judged == comparison.judged


def test_without_evaluations_the_training_reward_counts_and_the_report_says_so(tmp_path):
    for seed in range(3):
        made_run(tmp_path / f"a{seed}", "x=1", seed=seed, reward=0.5 + seed / 100)
        made_run(tmp_path / f"b{seed}", "x=2", seed=seed, reward=0.7 + seed / 100)
    comparison = compared(tmp_path)
    assert comparison.measure == TRAINING
    assert result(comparison, "x=2").difference.value == pytest.approx(0.2)
    assert result(comparison, "x=2").decision == "better"
    assert "by the training reward of the last 10 steps, 3 seeds each" in conclusion(comparison)
    assert "other examples in every run" in comparison.notes[0]


@pytest.mark.parametrize(
    ("steps", "judged"),
    [((6, 6), "the last 6 steps"), ((1, 1), "the last step"), ((6, 20), "the last 6 to 10 steps")],
)
def test_short_runs_are_judged_by_the_steps_that_they_have(steps, judged, tmp_path):
    for number, num_steps in enumerate(steps):
        made_run(tmp_path / f"a{number}", f"x={number}", steps=num_steps)
    comparison = compared(tmp_path)
    assert comparison.judged == judged
    assert f"by the training reward of {judged}, 1 seed each" in conclusion(comparison)
    assert forest(Canvas(comparison, tmp_path)).hconcat[0].title == f"training reward, {judged}"


def test_with_fewer_than_three_seeds_no_arm_is_called_better(tmp_path):
    first, _ = made_arm(tmp_path, "loss=grpo", seeds=2)
    made_arm(tmp_path, "loss=cispo", seeds=2, gain=0.4)
    alone, comparison = compared(first), compared(tmp_path)
    assert conclusion(alone).startswith("(as composed) scores 0.5")
    assert "1 seed." in conclusion(alone)
    assert "Fewer than 3 seeds" in alone.notes[0]
    assert {r.decision for r in comparison.others} == {"cannot tell"}
    assert "it takes 3 seeds of each arm" in conclusion(comparison)


def test_finished_runs_that_cannot_be_compared_are_left_out_and_named(three_arms):
    made_arm(three_arms, "loss=sapo", words="add up", seeds=1)
    made_run(three_arms / "bare", "loss=gspo")
    unscore(three_arms / "loss-dapo-s0", lambda line: True)
    comparison = compared(three_arms)
    assert left_out(comparison) == {
        "loss-sapo-s0": "it was asked other questions than cispo",
        "bare": "it has no evaluation",
        "loss-dapo-s0": "it could not be scored on most of its questions",
    }
    assert len(comparison.results) == 3
    assert (comparison.measure, len(comparison.questions)) == (HELD_OUT, NUM_QUESTIONS)
    assert compared(three_arms / "loss-dapo-s0").measure == TRAINING  # nothing else is left


def test_a_question_that_one_run_lacks_is_compared_for_no_run(three_arms):
    unscore(three_arms / "loss-dapo-s0", lambda line: line["example"] == 3)
    comparison = compared(three_arms)
    assert {q.example for q in comparison.questions} == {str(q) for q in range(16)} - {"3"}
    write_evaluation(RunFolder(three_arms / "loss-dapo-s0"), 20, [0.5] * 12)
    comparison = compared(three_arms)
    assert len(comparison.questions) == 12
    assert any("Compared on the 12 questions" in note for note in comparison.notes)


def test_unfinished_runs_are_left_out_each_with_its_cause(three_arms, tmp_path):
    for name, steps in (("stopped", 7), ("going", 8), ("failed", 3)):
        made_run(three_arms / name, "loss=cispo", steps=steps, max_steps=20)
    failed = RunFolder(three_arms / "failed")
    for folder in (failed.failures, failed.logs):
        folder.mkdir()
    report = {"part": "inference", "time": 1.0, "message": "vLLM is gone\nand more"}
    (failed.failures / "inference.json").write_text(json.dumps(report))
    failed.log_of("inference").write_text("one\nCUDA out of memory\n\n")
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    job = {"overrides": ["loss=ppo", "seed=0"], "folder": None, "error": "no such model"}
    (sweep / "jobs" / "00099.json").write_text(json.dumps(job))
    with open(three_arms / "going" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        comparison = compared(sweep)
    assert left_out(comparison) == {
        "stopped": "stopped after step 7 of 20",
        "going": "still going: step 8 of 20",
        "failed": "inference: vLLM is gone",
        "loss=ppo": "no such model",
    }
    last_lines = {run.name: run.last_log_line for run, _ in comparison.left_out}
    assert last_lines["failed"] == "inference: CUDA out of memory"


def test_equal_scores_of_all_runs_are_reported_as_nothing_to_learn_from(tmp_path):
    for loss, seeds in (("grpo", 2), ("dapo", 3)):
        for seed in range(seeds):
            made_run(tmp_path / f"{loss}-{seed}", f"loss={loss}", seed=seed, reward=0.0)
    start = "Every score of every run is 0: there was nothing to learn from"
    assert any(note.startswith(start) for note in compared(tmp_path).notes)
    made_run(tmp_path / "other", "loss=dapo", seed=3, reward=0.1)
    assert not any(note.startswith("Every score") for note in compared(tmp_path).notes)


def test_runs_that_do_not_count_are_grouped_by_cause_the_most_frequent_first(three_arms):
    for number in range(2):
        made_run(three_arms / f"bare-{number}", "loss=gspo")
    for step in (5, 6, 7):
        made_run(three_arms / f"stopped-{step}", "loss=cispo", steps=step, max_steps=20)
    (note,) = (note for note in compared(three_arms).notes if "not count" in note)
    assert note == (
        "5 runs do not count: bare-0 and 1 more: it has no evaluation; "
        "stopped-5: stopped after step 5 of 20; stopped-6: stopped after step 6 of 20; "
        "1 for other reasons, which the page names"
    )


@pytest.mark.parametrize(
    ("nothing", "expected", "noted"),
    [
        ("missing", "no run here", "does not exist"),
        ("empty", "no run here", "holds neither"),
        ("unfinished", "stopped after step 3 of 20", ""),
    ],
)
def test_a_comparison_without_a_run_that_counts_is_refused(nothing, expected, noted, tmp_path):
    (tmp_path / "empty").mkdir()
    made_run(tmp_path / "unfinished" / "one", steps=3, max_steps=20)
    with pytest.raises(NothingToCompare, match=expected):
        compared(tmp_path / nothing)
    assert noted in " ".join(read_sources([tmp_path / nothing]).notes)


def test_broken_files_are_counted_and_the_rest_is_read(three_arms, tmp_path):
    folder = RunFolder(three_arms / "loss-dapo-s0")
    with folder.metrics.open("a") as file:
        file.write('{"step": 21, "train/rew\n')
    evaluation = folder.evaluation_of(20)
    broken = evaluation.read_bytes().replace(b"reverse 3", b"reverse \xff3", 1)
    evaluation.write_bytes(broken + b"not json\n")
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    (sweep / "jobs" / "00099.json").write_text("{half")
    comparison = compared(sweep)
    assert len(comparison.results) == 3
    assert len(comparison.questions) == NUM_QUESTIONS  # question 3 has another rollout
    assert any("3 lines of metrics or evaluations cannot be read" in n for n in comparison.notes)
    assert any("00099.json is no record of a job" in note for note in comparison.notes)


def test_unexpected_content_of_a_file_does_not_affect_other_runs(three_arms, tmp_path):
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    job = {"overrides": ["loss=gspo"], "folder": 7, "error": None}
    (sweep / "jobs" / "00099.json").write_text(json.dumps(job))
    for info, config in (("[]", "a: ["), ('{"command": "python \'train.py"}', "max_steps: many\n")):
        (sweep / "sweep.json").write_text(info)
        RunFolder(three_arms / "loss-dapo-s0").config.write_text(config)
        assert len(compared(sweep, baseline="loss=grpo").results) == 3
    assert read_sources([sweep]).command == "python 'train.py"
    # A run that is named twice counts once.
    assert len(compared(sweep, three_arms, three_arms / "loss-dapo-s0").runs) == 16


def test_several_environments_have_an_interquartile_mean_beside_the_mean(tmp_path):
    for loss, gain in (("grpo", 0.0), ("cispo", 0.1)):
        for seed in range(3):
            folder = made_run(
                tmp_path / f"{loss}{seed}", f"loss={loss}", seed=seed, evaluations={20: [0.5] * 4}
            )
            path = RunFolder(folder).evaluation_of(20)
            text = path.read_text() + path.read_text().replace("reverse", "add")
            path.write_text(text.replace('"reward": 0.5', f'"reward": {0.5 + gain}'))
    comparison = compared(tmp_path)
    assert [len(set(r.scores.strata)) for r in comparison.results] == [2, 2]
    assert all(r.interquartile is not None for r in comparison.results)


@pytest.mark.parametrize("rewards", [(0.4, 0.6), (0.4, 0.5, 0.9), (0.5,), (0.3, 0.4, 0.8, 0.9)])
def test_half_of_the_baselines_runs_reach_its_own_final_score(rewards, tmp_path):
    for seed, reward in enumerate(rewards):
        made_run(tmp_path / f"a{seed}", "x=1", seed=seed, reward=reward)
        made_run(tmp_path / f"b{seed}", "x=2", seed=seed, reward=0.85 * (seed == 0))
    comparison = compared(tmp_path, baseline="x=1")
    reached = result(comparison, "x=1").efficiency
    assert reached.num_reached >= len(rewards) / 2
    assert (reached.steps, reached.seconds, reached.tokens) == (0, 0, 0)
    row = next(row for row in efficiency(comparison).rows if row[0] == "x=2")
    assert row[1] == ("0" if len(rewards) < 3 else "fewer than half")
    assert row[4] == f"1 of {len(rewards)}"


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["loss=grpo", "loss=cispo"], ["grpo", "cispo"]),
        (["optim.learning_rate=0.1", "optim.learning_rate=0.2"],
         ["learning_rate=0.1", "learning_rate=0.2"]),
        (["loss=grpo", "env=wiki"], ["loss=grpo", "env=wiki"]),
        (["loss=grpo kl=k3", "loss=cispo kl=k3"], ["loss=grpo kl=k3", "loss=cispo kl=k3"]),
        (["(as composed)"], ["(as composed)"]),
    ],
)  # fmt: skip
def test_the_name_of_an_arm_is_as_short_as_the_others_allow(labels, names):
    assert short(labels) == names


def test_questions_are_paired_between_arms(tmp_path):
    """Questions differ by much more than arms do, so unpaired arms could not be told apart."""
    rng = np.random.default_rng(0)
    difficulty = rng.uniform(0, 1, NUM_QUESTIONS)
    for loss, gain in (("grpo", 0.0), ("cispo", 0.02)):
        for seed in range(3):
            last = difficulty + gain + rng.normal(0, 0.002)
            made_run(tmp_path / f"{loss}{seed}", f"loss={loss}", seed=seed, evaluations={20: last})
    found = result(compared(tmp_path, baseline="loss=grpo"), "cispo").difference
    assert 0.01 < found.low < 0.02 < found.high < 0.03


def test_the_training_reward_is_that_of_the_last_steps_and_seconds_are_before_a_step(tmp_path):
    (run,) = read_sources([made_run(tmp_path / "a", reward=0.5)]).runs
    run.training.scores[:] = np.arange(20)
    assert run.training_reward == 14.5
    assert run.training.seconds[2] == 6.0  # two steps of 3 s


def test_a_setting_that_a_later_commit_added_makes_no_new_arm(tmp_path):
    """A sweep was resumed after an update of this code."""
    for seed, commit, added in ((0, "old", {}), (1, "new", {"cluster": {"listen": "unix"}})):
        for loss in ("grpo", "cispo"):
            made_run(
                tmp_path / f"{loss}{seed}", f"loss={loss}", seed=seed, commit=commit,
                loss={"_target_": f"losses.{loss}.{loss}"}, **added,
            )  # fmt: skip
    tcp = {"loss": {"_target_": "losses.grpo.grpo"}, "cluster": {"listen": "tcp"}}
    made_run(tmp_path / "by-tcp", "loss=grpo", "cluster.listen=tcp", commit="new", **tcp)
    names = sorted([run.name for run in arm.runs] for arm in read_arms(tmp_path))
    assert names == [["by-tcp"], ["cispo0", "cispo1"], ["grpo0", "grpo1"]]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_setting_that_two_later_commits_do_not_share_separates_them(tmp_path, reverse):
    added = [("a", {}), ("b", {"clip": 1}), ("c", {"clip": 2}), ("d", {"clip": {"high": 2}})]
    for index, (commit, settings) in enumerate(reversed(added) if reverse else added):
        made_run(tmp_path / f"{index}{commit}", "loss=mine", commit=commit, **settings)
    together = [{run.name[1:] for run in arm.runs} for arm in read_arms(tmp_path)]
    assert sum(len(names) for names in together) == 4
    assert not any({"b", "c"} <= names or {"b", "d"} <= names or {"c", "d"} <= names
                   for names in together)  # fmt: skip


def test_runs_with_the_name_of_their_loss_are_separate_arms(tmp_path):
    for loss in ("grpo", "cispo"):
        made_run(
            tmp_path / loss, f"loss={loss}", loss={"_target_": f"losses.{loss}.{loss}"},
            cache=f"/tmp/{loss}/cache", shown_as=f"lab-{loss}",
        )  # fmt: skip
    arms = read_arms(tmp_path)
    assert [arm.name for arm in arms] == ["cispo", "grpo"]
    differing = set(arms[0].runs[0].config) - {"choice"}
    assert differing == {"loss._target_", "max_steps"}  # no value that contains the run's name


def test_an_arm_without_any_reward_cannot_be_the_baseline(tmp_path):
    for seed in range(3):
        bare = RunFolder(made_run(tmp_path / f"a{seed}", "loss=sft", seed=seed))
        bare.metrics.write_text(bare.metrics.read_text().replace("train/reward", "train/loss"))
    with pytest.raises(NothingToCompare, match="neither an evaluation nor a training reward"):
        compared(tmp_path)
    for seed in range(3):
        made_run(tmp_path / f"b{seed}", "loss=grpo", seed=seed)
    comparison = compared(tmp_path)
    assert [one.arm.name for one in comparison.results] == ["grpo"]
    assert set(left_out(comparison).values()) == {"it has no reward"}
    with pytest.raises(NothingToCompare, match="sft has neither"):
        compared(tmp_path, baseline="loss=sft")


def test_arms_are_named_by_differing_settings_and_no_two_arms_share_a_name(tmp_path):
    for name, rate in (("a", 1), ("b", 2)):
        made_run(tmp_path / "two" / name, optim={"rate": rate})
    assert [arm.label for arm in read_arms(tmp_path / "two")] == ["optim.rate=1", "optim.rate=2"]
    for index, last in enumerate((1, 2, 3, 3)):
        first = min(index + 1, 3) // 3  # 0, 0, 1, 1
        made_run(tmp_path / f"r{index}", a=first, b=first, c=first, d=last, e=index)
    made_run(tmp_path / "other", "loss=grpo", a=0, b=0, c=0, d=5, e=6, f=7)
    made_run(tmp_path / "another", "loss=grpo", a=0, b=0, c=0, d=5, e=6, f=8)
    labels = [arm.label for arm in read_arms(tmp_path)]
    assert len(set(labels)) == 6
    assert {"loss=grpo f=7", "loss=grpo f=8"} <= set(labels)


def test_the_conclusion_asks_for_at_least_one_more_seed(three_arms):
    comparison = compared(three_arms, baseline="grpo")
    needed = {"dapo": 3, "cispo": 5}  # fewer than there are, and as many
    results = [
        replace(one, decision=one.decision and UNCLEAR, seeds_needed=needed.get(one.arm.name))
        for one in comparison.results
    ]
    base = next(one for one in results if one.arm.name == "grpo")
    text = conclusion(replace(comparison, results=tuple(results), baseline=base))
    assert "1 more seed each would do for" in text
    assert "-1" not in text
    assert "0 for" not in text


def test_runs_of_one_name_in_two_folders_keep_their_own_scores(tmp_path):
    made_run(tmp_path / "one" / "s0", "loss=grpo", reward=0.25)
    made_run(tmp_path / "two" / "s0", "loss=cispo", reward=0.75)
    lines = csv.DictReader(as_csv(compared(tmp_path / "one", tmp_path / "two")).splitlines())
    assert {line["arm"]: line["score"] for line in lines} == {
        "loss=grpo": "0.25", "loss=cispo": "0.75",
    }  # fmt: skip
