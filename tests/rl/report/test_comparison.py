"""Runs compared: the numbers computed again by other means, and what to do with what is missing."""

import csv
import fcntl
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from rl.report import arms as arms_module
from rl.report.arms import arms_of
from rl.report.charts import Datasets, forest
from rl.report.comparison import NothingToCompare, compare
from rl.report.evidence import evidence_of
from rl.report.judging import HELD_OUT, TRAINING
from rl.report.page_facts import efficiency
from rl.report.run_sources import read_sources
from rl.report.sentence import sentence
from rl.report.statistics import UNCLEAR
from rl.report.summary import as_csv, as_record
from rl.run.folder import RunFolder
from rl.run.status import Status
from tests.support.finished_runs import (
    NUM_QUESTIONS,
    made_arm,
    made_run,
    made_sweep,
    write_evaluation,
)


def compared(*paths, num_judged=1, **keywords):
    sources = read_sources(paths)
    runs = [evidence_of(run, num_judged) for run in sources.runs]
    return compare(
        arms_of(runs), question=sources.question, notes=sources.notes, num_judged=num_judged,
        **keywords,
    )  # fmt: skip


def result(comparison, name):
    return next(one for one in comparison.results if one.arm.name == name)


def last_rewards(folder):
    """Mean reward of every question at version 20, read anew."""
    lines = [json.loads(x) for x in RunFolder(folder).evaluation_of(20).read_text().splitlines()]
    return np.array(
        [
            np.mean([line["reward"] for line in lines if line["example"] == q])
            for q in range(NUM_QUESTIONS)
        ]
    )


@pytest.fixture
def three_arms(tmp_path):
    """grpo, and one clearly better, and one like it."""
    made_arm(tmp_path / "runs", "loss=grpo")
    made_arm(tmp_path / "runs", "loss=cispo", gain=0.2)
    made_arm(tmp_path / "runs", "loss=dapo", gain=0.0)
    return tmp_path / "runs"


def test_the_numbers_are_those_of_the_files(three_arms):
    comparison = compared(three_arms, baseline="loss=grpo")
    cispo, grpo = result(comparison, "cispo"), result(comparison, "grpo")
    ours, base = (
        np.array([last_rewards(three_arms / f"loss-{loss}-s{seed}") for seed in range(5)])
        for loss in ("cispo", "grpo")
    )
    assert comparison.measure == HELD_OUT
    assert cispo.score.value == pytest.approx(ours.mean())
    assert cispo.difference.value == pytest.approx(ours.mean() - base.mean())
    assert cispo.chance_better == 1.0
    # Seeds differ by 0.02 and questions by next to nothing, so Welch's test has nearly the p.
    welch = stats.ttest_ind(ours.mean(1), base.mean(1), equal_var=False)
    assert 4 * welch.pvalue > cispo.p_value > welch.pvalue / 4
    reference = stats.bootstrap(
        (ours.mean(1), base.mean(1)), lambda x, y, axis: x.mean(axis) - y.mean(axis), rng=0
    ).confidence_interval
    drawn = cispo.difference.high - cispo.difference.low
    assert 0.8 < drawn / (reference.high - reference.low) < 1.7  # wider: five seeds are few
    assert grpo.verdict == ""
    assert grpo.efficiency.steps <= 20
    assert cispo.efficiency.num_reached == 5
    assert cispo.area == pytest.approx(
        np.mean([(0.3 + x.mean()) / 2 for x in ours]), abs=1e-6
    )  # from 0.3 in a straight line


def test_the_sentence_names_what_is_better_and_what_cannot_be_told(three_arms):
    text = sentence(compared(three_arms, baseline="grpo"))
    assert text.startswith("cispo (by 0.")
    assert (
        "beats grpo on 16 held-out questions, 5 seeds each; dapo cannot be told from grpo" in text
    )
    assert "smallest visible difference 0.0" in text


def test_seen_from_the_other_side_it_is_worse(three_arms):
    comparison = compared(three_arms, baseline="cispo")
    assert {r.arm.name: r.verdict for r in comparison.others} == {"grpo": "worse", "dapo": "worse"}
    assert "are worse than cispo" in sentence(comparison)


def test_the_baseline_is_the_first_arm_that_was_run(three_arms, tmp_path):
    runs = sorted(three_arms.iterdir(), reverse=True)  # grpo first
    sweep = made_sweep(tmp_path / "sweep", runs, "Which loss?")
    comparison = compared(sweep)
    assert comparison.baseline.arm.label == "loss=grpo"
    assert comparison.question == "Which loss?"


def test_a_baseline_that_does_not_exist_is_answered_with_those_that_do(three_arms):
    with pytest.raises(NothingToCompare, match="baseline= is one of loss=cispo, loss=dapo"):
        compared(three_arms, baseline="loss=ppo")


def test_the_same_runs_give_the_same_numbers(three_arms):
    first, second = (as_record(c, c.arms) for c in (compared(three_arms), compared(three_arms)))
    assert first == second


def test_the_mean_of_several_evaluations_is_judged_where_it_is_asked_for(three_arms):
    comparison = compared(three_arms, num_judged=2)
    run = result(comparison, "cispo").runs[0]
    at = [np.mean(list(run.evaluations[v].scores.values())) for v in (10, 20)]
    assert result(comparison, "cispo").scores.runs[0] == pytest.approx(np.mean(at))
    assert comparison.judged == "the last 2 evaluations, up to version 20"
    # The policy that nobody trained is none of the last, however many are asked for.
    assert compared(three_arms, num_judged=3).judged == comparison.judged


def test_without_evaluations_the_training_reward_counts_and_is_marked(tmp_path):
    for seed in range(3):
        made_run(tmp_path / f"a{seed}", "x=1", seed=seed, reward=0.5 + seed / 100)
        made_run(tmp_path / f"b{seed}", "x=2", seed=seed, reward=0.7 + seed / 100)
    comparison = compared(tmp_path)
    assert comparison.measure == TRAINING
    assert result(comparison, "x=2").difference.value == pytest.approx(0.2)
    assert result(comparison, "x=2").verdict == "better"
    assert "by the training reward of the last 10 steps, 3 seeds each" in sentence(comparison)
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
    assert f"by the training reward of {judged}, 1 seed each" in sentence(comparison)
    assert forest(comparison, Datasets(tmp_path)).hconcat[0].title == f"training reward, {judged}"


def test_one_run_has_a_score_and_no_verdict(tmp_path):
    (folder,) = made_arm(tmp_path, "loss=grpo", seeds=1)
    comparison = compared(folder)
    assert sentence(comparison).startswith("(as composed) scores 0.5")
    assert "1 seed." in sentence(comparison)
    assert "Fewer than 3 seeds" in comparison.notes[0]


def test_with_two_seeds_no_arm_is_called_better(tmp_path):
    made_arm(tmp_path, "loss=grpo", seeds=2)
    made_arm(tmp_path, "loss=cispo", seeds=2, gain=0.4)
    comparison = compared(tmp_path)
    assert {r.verdict for r in comparison.others} == {"cannot tell"}
    assert "it takes 3 seeds of each arm" in sentence(comparison)


def test_runs_that_were_asked_other_questions_are_left_out_and_named(three_arms):
    made_arm(three_arms, "loss=sapo", words="add up")
    comparison = compared(three_arms)
    assert {run.name[:9] for run, _ in comparison.left_out} == {"loss-sapo"}
    assert {why for _, why in comparison.left_out} == {"it was asked other questions than cispo"}
    assert len(comparison.results) == 3


def test_questions_that_some_run_lacks_are_compared_by_none(three_arms):
    run = RunFolder(three_arms / "loss-dapo-s0")
    write_evaluation(run, 20, [0.5] * 12)
    comparison = compared(three_arms)
    assert len(comparison.questions) == 12
    assert any("Compared on the 12 questions" in note for note in comparison.notes)


def test_a_question_that_could_not_be_scored_in_one_run_is_left_out(three_arms):
    path = RunFolder(three_arms / "loss-dapo-s0").evaluation_of(20)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line | ({"reward": None} if line["example"] == 3 else {}) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = compared(three_arms)
    assert {q.example for q in comparison.questions} == {str(q) for q in range(16)} - {"3"}


def test_one_run_that_could_not_be_scored_costs_the_others_no_question(three_arms):
    path = RunFolder(three_arms / "loss-dapo-s0").evaluation_of(20)
    lines = [json.loads(line) | {"reward": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = compared(three_arms)
    assert (comparison.measure, len(comparison.questions)) == (HELD_OUT, NUM_QUESTIONS)
    assert [(run.name, why) for run, why in comparison.left_out] == [
        ("loss-dapo-s0", "it could not be scored on most of its questions")
    ]
    assert compared(three_arms / "loss-dapo-s0").measure == TRAINING  # nothing else is left


def test_a_run_without_an_evaluation_is_left_out_where_others_have_one(three_arms):
    made_run(three_arms / "bare", "loss=gspo")
    assert [(run.name, why) for run, why in compared(three_arms).left_out] == [
        ("bare", "it has no evaluation")
    ]


def test_unfinished_runs_are_left_out_each_with_its_cause(three_arms):
    stopped = made_run(three_arms / "stopped", "loss=cispo", steps=7, max_steps=20)
    going = made_run(three_arms / "going", "loss=cispo", steps=8, max_steps=20)
    failed = made_run(three_arms / "failed", "loss=cispo", steps=3, max_steps=20)
    (failed / "failures").mkdir()
    report = {"part": "inference", "time": 1.0, "message": "vLLM is gone\nand more"}
    (failed / "failures" / "inference.json").write_text(json.dumps(report))
    (failed / "logs").mkdir()
    (failed / "logs" / "inference.log").write_text("one\nCUDA out of memory\n\n")
    with open(going / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        comparison = compared(three_arms)
    left = {run.name: (why, run.last_log_line) for run, why in comparison.left_out}
    assert left["stopped"][0] == "stopped after step 7 of 20"
    assert left["going"][0] == "still going: step 8 of 20"
    assert left["failed"] == ("inference: vLLM is gone", "inference: CUDA out of memory")
    assert stopped.name in left


def test_runs_that_all_have_one_score_say_that_there_was_nothing_to_learn_from(tmp_path):
    for loss, seeds in (("grpo", 2), ("dapo", 3)):
        for seed in range(seeds):
            made_run(tmp_path / f"{loss}-{seed}", f"loss={loss}", seed=seed, reward=0.0)
    said = "Every score of every run is 0: there was nothing to learn from"
    assert any(note.startswith(said) for note in compared(tmp_path).notes)
    made_run(tmp_path / "other", "loss=dapo", seed=3, reward=0.1)
    assert not any(note.startswith("Every score") for note in compared(tmp_path).notes)


def test_what_does_not_count_is_said_by_cause_the_commonest_first(three_arms):
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
    ("doing", "counts"),
    [
        ("done: the task is solved: the buffer rejected the last 64 groups", True),
        ("done: stopped, as asked", False),
        ("done", False),
        ("training step 15", False),
    ],
)
def test_a_run_that_had_nothing_left_to_learn_counts(doing, counts, tmp_path):
    folder = made_run(tmp_path / "early", steps=15, max_steps=20)
    Status(RunFolder(folder), "trainer.rank0").set(doing)
    assert evidence_of(read_sources([folder]).runs[0]).finished == counts


@pytest.mark.parametrize("nothing", ["missing", "empty", "unfinished"])
def test_where_nothing_counts_it_is_said_in_a_sentence(nothing, tmp_path):
    if nothing == "empty":
        (tmp_path / nothing).mkdir()
    if nothing == "unfinished":
        made_run(tmp_path / nothing / "one", steps=3, max_steps=20)
    expected = "stopped after step 3 of 20" if nothing == "unfinished" else "no run here"
    with pytest.raises(NothingToCompare, match=expected):
        compared(tmp_path / nothing)
    notes = " ".join(read_sources([tmp_path / nothing]).notes)
    assert {"missing": "does not exist", "empty": "holds neither"}.get(nothing, "") in notes


def test_broken_lines_and_records_are_counted_and_the_rest_is_read(three_arms, tmp_path):
    with (three_arms / "loss-dapo-s0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "train/rew\n')
    with RunFolder(three_arms / "loss-dapo-s0").evaluation_of(20).open("a") as file:
        file.write("not json\n")
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    (sweep / "jobs" / "00099.json").write_text("{half")
    comparison = compared(sweep)
    assert len(comparison.results) == 3
    assert any("2 lines of metrics or evaluations cannot be read" in n for n in comparison.notes)
    assert any("00099.json is no record of a job" in note for note in comparison.notes)


def test_a_config_that_cannot_be_read_costs_no_other_run(three_arms):
    (three_arms / "loss-dapo-s0" / "config.yaml").write_text("a: [")
    comparison = compared(three_arms)
    assert {arm.name for arm in comparison.arms} >= {"cispo", "dapo", "grpo"}


def test_records_that_hold_something_else_cost_no_other_run(three_arms, tmp_path):
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    job = {"overrides": ["loss=gspo"], "folder": 7, "error": None}
    (sweep / "jobs" / "00099.json").write_text(json.dumps(job))
    (three_arms / "loss-dapo-s0" / "config.yaml").write_text("max_steps: many\n")
    for info in ("[]", '{"command": "python \'train.py"}'):
        (sweep / "sweep.json").write_text(info)
        assert len(compared(sweep, baseline="loss=grpo").results) == 3
    assert read_sources([sweep]).command == "python 'train.py"


def test_a_run_that_is_named_twice_counts_once(three_arms, tmp_path):
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    assert len(compared(sweep, three_arms, three_arms / "loss-dapo-s0").runs) == 15


def test_a_job_that_never_had_a_folder_is_a_failed_run_of_its_arm(three_arms, tmp_path):
    sweep = made_sweep(tmp_path / "sweep", sorted(three_arms.iterdir()))
    job = {"overrides": ["loss=ppo", "seed=0"], "folder": None, "error": "no such model"}
    (sweep / "jobs" / "00099.json").write_text(json.dumps(job))
    comparison = compared(sweep)
    assert [(run.name, why) for run, why in comparison.left_out] == [("loss=ppo", "no such model")]


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


def test_arms_are_called_by_what_they_override_and_as_short_as_can_be(tmp_path):
    def names(*labels):
        return arms_module.short(labels)

    assert names("loss=grpo", "loss=cispo") == ["grpo", "cispo"]
    assert names("optim.learning_rate=0.1", "optim.learning_rate=0.2") == [
        "learning_rate=0.1",
        "learning_rate=0.2",
    ]
    assert names("loss=grpo", "env=wiki") == ["loss=grpo", "env=wiki"]
    assert names("loss=grpo kl=k3", "loss=cispo kl=k3") == ["loss=grpo kl=k3", "loss=cispo kl=k3"]
    assert names("(as composed)") == ["(as composed)"]
    made_run(tmp_path / "a", optim={"rate": 1})
    made_run(tmp_path / "b", optim={"rate": 2})
    labels = [arm.label for arm in arms_of([evidence_of(r) for r in read_sources([tmp_path]).runs])]
    assert labels == ["optim.rate=1", "optim.rate=2"]


def test_arms_are_compared_question_by_question(tmp_path):
    """Questions differ by much more than arms do: without that, nothing could be told."""
    rng = np.random.default_rng(0)
    difficulty = rng.uniform(0, 1, NUM_QUESTIONS)
    for loss, gain in (("grpo", 0.0), ("cispo", 0.02)):
        for seed in range(3):
            last = difficulty + gain + rng.normal(0, 0.002)
            made_run(tmp_path / f"{loss}{seed}", f"loss={loss}", seed=seed, evaluations={20: last})
    found = result(compared(tmp_path, baseline="loss=grpo"), "cispo").difference
    assert 0.01 < found.low < 0.02 < found.high < 0.03


def test_of_training_rewards_the_last_steps_count(tmp_path):
    run = evidence_of(read_sources([made_run(tmp_path / "a", reward=0.5)]).runs[0])
    run.training.scores[:] = np.arange(20)
    assert run.training_reward == 14.5


def test_a_step_is_where_it_began(tmp_path):
    run = evidence_of(read_sources([made_run(tmp_path / "a", reward=0.5)]).runs[0])
    assert run.training.seconds[2] == 6.0  # before the third step, of 3 s each


def test_a_setting_that_a_later_commit_added_makes_no_arm_of_its_own(tmp_path):
    """A sweep that goes on after an update of this code."""
    for seed, commit, added in ((0, "old", {}), (1, "new", {"cluster": {"listen": "unix"}})):
        for loss in ("grpo", "cispo"):
            made_run(
                tmp_path / f"{loss}{seed}", f"loss={loss}", seed=seed, commit=commit,
                loss={"_target_": f"losses.{loss}.{loss}"}, **added,
            )  # fmt: skip
    tcp = {"loss": {"_target_": "losses.grpo.grpo"}, "cluster": {"listen": "tcp"}}
    made_run(tmp_path / "by-tcp", "loss=grpo", "cluster.listen=tcp", commit="new", **tcp)
    arms = arms_of([evidence_of(run) for run in read_sources([tmp_path]).runs])
    names = sorted([run.name for run in arm.runs] for arm in arms)
    assert names == [["by-tcp"], ["cispo0", "cispo1"], ["grpo0", "grpo1"]]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_setting_that_two_later_commits_do_not_share_tells_them_apart(tmp_path, reverse):
    added = [("a", {}), ("b", {"clip": 1}), ("c", {"clip": 2}), ("d", {"clip": {"high": 2}})]
    for place, (commit, settings) in enumerate(reversed(added) if reverse else added):
        made_run(tmp_path / f"{place}{commit}", "loss=mine", commit=commit, **settings)
    arms = arms_of([evidence_of(run) for run in read_sources([tmp_path]).runs])
    together = [{run.name[1:] for run in arm.runs} for arm in arms]
    assert sum(len(names) for names in together) == 4
    assert not any({"b", "c"} <= names or {"b", "d"} <= names or {"c", "d"} <= names
                   for names in together)  # fmt: skip


def test_runs_that_are_called_like_their_choice_are_arms_of_their_own(tmp_path):
    for loss in ("grpo", "cispo"):
        made_run(
            tmp_path / loss, f"loss={loss}", loss={"_target_": f"losses.{loss}.{loss}"},
            cache=f"/tmp/{loss}/cache", shown_as=f"lab-{loss}",
        )  # fmt: skip
    arms = arms_of([evidence_of(run) for run in read_sources([tmp_path]).runs])
    assert [arm.name for arm in arms] == ["cispo", "grpo"]
    differing = set(arms[0].runs[0].config) - {"choice"}
    assert differing == {"loss._target_", "max_steps"}  # nothing that holds the run's name


def test_an_arm_without_any_reward_is_no_baseline(tmp_path):
    for seed in range(3):
        bare = RunFolder(made_run(tmp_path / f"a{seed}", "loss=sft", seed=seed))
        bare.metrics.write_text(bare.metrics.read_text().replace("train/reward", "train/loss"))
    with pytest.raises(NothingToCompare, match="neither an evaluation nor a training reward"):
        compared(tmp_path)
    for seed in range(3):
        made_run(tmp_path / f"b{seed}", "loss=grpo", seed=seed)
    comparison = compared(tmp_path)
    assert [one.arm.name for one in comparison.results] == ["grpo"]
    assert {why for _, why in comparison.left_out} == {"it has no reward"}
    with pytest.raises(NothingToCompare, match="sft has neither"):
        compared(tmp_path, baseline="loss=sft")


def test_no_two_arms_have_one_name(tmp_path):
    for index, last in enumerate((1, 2, 3, 3)):
        first = min(index + 1, 3) // 3  # 0, 0, 1, 1
        made_run(tmp_path / f"r{index}", a=first, b=first, c=first, d=last, e=index)
    made_run(tmp_path / "other", "loss=grpo", a=0, b=0, c=0, d=5, e=6, f=7)
    made_run(tmp_path / "another", "loss=grpo", a=0, b=0, c=0, d=5, e=6, f=8)
    labels = [arm.label for arm in arms_of([evidence_of(r) for r in read_sources([tmp_path]).runs])]
    assert len(set(labels)) == 6
    assert {"loss=grpo f=7", "loss=grpo f=8"} <= set(labels)


def test_no_arm_takes_less_than_one_more_seed(three_arms):
    comparison = compared(three_arms, baseline="grpo")
    needed = {"dapo": 3, "cispo": 5}  # fewer than there are, and as many
    results = [
        replace(one, verdict=one.verdict and UNCLEAR, seeds_needed=needed.get(one.arm.name))
        for one in comparison.results
    ]
    base = next(one for one in results if one.arm.name == "grpo")
    text = sentence(replace(comparison, results=tuple(results), baseline=base))
    assert "1 more seed each would do for" in text
    assert "-1" not in text
    assert "0 for" not in text


def test_a_line_of_an_evaluation_that_is_no_text_is_counted_and_left_out(three_arms):
    path = RunFolder(three_arms / "loss-dapo-s0").evaluation_of(20)
    path.write_bytes(path.read_bytes().replace(b"reverse 3", b"reverse \xff3", 1))
    comparison = compared(three_arms)
    assert len(comparison.questions) == NUM_QUESTIONS  # the other rollout of question 3 is left
    assert any(note.startswith("1 lines of metrics or evaluations") for note in comparison.notes)


def test_runs_of_one_name_in_two_folders_keep_their_own_scores(tmp_path):
    made_run(tmp_path / "one" / "s0", "loss=grpo", reward=0.25)
    made_run(tmp_path / "two" / "s0", "loss=cispo", reward=0.75)
    lines = csv.DictReader(as_csv(compared(tmp_path / "one", tmp_path / "two")).splitlines())
    assert {line["arm"]: line["score"] for line in lines} == {
        "loss=grpo": "0.25", "loss=cispo": "0.75",
    }  # fmt: skip
