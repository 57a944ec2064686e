"""Compared runs: the numbers computed again by other means, and what happens to missing data."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lab.report.arms import Arm
from lab.report.comparison import NoBaseline, NothingToCompare, compare
from lab.report.conclusion import basis, conclusion, describe_power
from lab.report.numbers import as_json
from lab.report.scoring import HELD_OUT, TRAINING
from tests.support.compared_runs import NUM_QUESTIONS, arm, result, run, scores


@pytest.fixture
def three_arms():
    """grpo, and one clearly better, and one like it."""
    return [arm("grpo", scores(1)), arm("cispo", scores(2, 0.2)), arm("dapo", scores(3))]


def left_out(comparison):
    return {run.name: why for run, why in comparison.left_out}


def test_the_numbers_are_those_of_the_scores(three_arms):
    comparison = compare(three_arms, baseline="loss=grpo")
    cispo, grpo = result(comparison, "cispo"), result(comparison, "grpo")
    one, base = np.array(scores(2, 0.2)), np.array(scores(1))
    assert comparison.scoring.measure == HELD_OUT
    assert cispo.score.value == pytest.approx(one.mean())
    assert cispo.difference.value == pytest.approx(one.mean() - base.mean())
    assert cispo.chance_better == 1.0
    # Seeds differ by 0.02 and questions by next to nothing, so Welch's test has nearly the p.
    welch = stats.ttest_ind(one.mean(1), base.mean(1), equal_var=False)
    assert 4 * welch.pvalue > cispo.p_value > welch.pvalue / 4
    assert grpo.decision == "baseline"


def test_the_conclusion_names_what_is_better_or_worse_and_what_cannot_be_told(three_arms):
    comparison = compare(three_arms)
    assert comparison.baseline.arm.label == "loss=grpo"
    assert as_json(comparison) == as_json(compare(three_arms))
    assert conclusion(comparison).startswith("cispo (by 0.")
    assert conclusion(comparison).endswith("beats grpo; dapo cannot be distinguished from grpo.")
    assert basis(comparison) == "Scored on 16 held-out questions, version 20, 5 seeds each."
    assert describe_power(comparison).startswith("The smallest visible difference is 0.0")
    reverse = compare(three_arms, baseline="cispo")
    assert {r.arm.name: r.decision for r in reverse.others} == {"grpo": "worse", "dapo": "worse"}
    assert "are worse than cispo" in conclusion(reverse)


@pytest.mark.parametrize(
    ("arms", "baseline", "problem"),
    [
        ([], "", "contain no run"),
        ([Arm("a", "a", (run(cause="stopped"),))], "", "finished .run: stopped.: finish one"),
        ([arm("a", scores(1))], "b", "baseline=b is not an arm: choose one of loss=a"),
        ([arm("a", scores(1)), Arm("x", "x", (run(cause="stopped"),))], "x", "no run of baseline="),
    ],
    ids=["no run", "no finished run", "unknown", "unfinished"],
)
def test_a_comparison_without_a_run_that_counts_is_refused(arms, baseline, problem):
    with pytest.raises((NothingToCompare, NoBaseline), match=problem):
        compare(arms, baseline=baseline)


def test_several_evaluations_are_averaged_but_never_the_untrained_version():
    by_version = {0: [0.0, 0.0], 10: [0.2, 0.4], 20: [0.4, 0.8]}
    evaluations = {v: run(scores).evaluations[20] for v, scores in by_version.items()}
    arms = [Arm("a", "a", (replace(run(), evaluations=evaluations),))]
    for num_judged in (2, 3):
        comparison = compare(arms, num_judged=num_judged)
        assert comparison.baseline.scores.means[0] == pytest.approx((0.2 + 0.4 + 0.4 + 0.8) / 4)
        assert comparison.scoring.judged == "the last 2 evaluations, up to version 20"


def test_the_training_reward_counts_if_no_question_is_scored_and_the_report_says_why():
    rewards = (0.5, 0.51, 0.52)
    first, last = [0.5, 0.5, None, None], [None, None, 0.5, 0.5]
    for scored, why in (
        ([[None] * 4] * 3, "most evaluation questions of a have no score"),
        ([first, last, first], "no evaluation question has a score in every run"),
    ):
        runs = [run(scored[i], rewards=[rewards[i]] * 20, seed=i) for i in range(3)]
        comparison = compare([Arm("a", "a", tuple(runs)), arm("b", rewards=rewards)])
        assert comparison.scoring.measure == TRAINING
        assert comparison.notes[0].endswith(f"because {why}.")
    unscored = Arm("a", "a", (run([None] * 4),))
    with pytest.raises(NothingToCompare, match="a has no training reward, and most evaluation"):
        compare([unscored, arm("b", rewards=rewards)], baseline="a")


def test_the_share_of_unscored_training_rollouts_is_named():
    plain, lossy = arm("a", rewards=(0.5, 0.51, 0.52)), arm("b", rewards=(0.7, 0.71, 0.72))
    assert not any("Training rollouts" in note for note in compare([plain, lossy]).notes)
    shares = zip(lossy.runs, (0.0, 0.1, 0.2), strict=True)
    lossy = replace(lossy, runs=tuple(replace(one, unscored_share=x) for one, x in shares))
    note = next(note for note in compare([plain, lossy]).notes if "Training rollouts" in note)
    assert note.startswith("Training rollouts without a score: b 10.0 %.")


def test_the_training_reward_is_that_of_the_last_steps():
    assert run(rewards=range(20)).training_reward == 14.5
    smooth = run(rewards=range(20)).training.smoothed(4)
    assert smooth.scores[[0, 1, 2, 3, 19]] == pytest.approx([0, 0.5, 1, 1.5, 17.5])


def test_scores_that_never_differ_and_rewards_of_different_steps_are_noted():
    pairs = [arm("a", [[0.5] * 4] * 3), arm("b", [[0.5] * 4] * 3)]
    assert compare(pairs).notes[0].startswith("Every score of every run is 0.5. ")
    assert not any("Every score" in note for note in compare([arm("a", [[0.5]])]).notes)
    runs = [run(rewards=[0.25] * n, num_steps=n, seed=n) for n in (1, 4)]
    assert "of the last step, 1 seed." in basis(compare([Arm("a", "a", (runs[0],))]))
    comparison = compare([Arm(str(i), str(i), (one,)) for i, one in enumerate(runs)])
    assert "of the last 1 to 4 steps, 1 seed each." in basis(comparison)
    (note,) = [note for note in comparison.notes if "scored at different" in note]
    assert note == ("The runs are scored at different steps, so compare with care: 0 at 0, 1 at 3.")


def test_with_fewer_than_three_seeds_no_arm_is_called_better():
    arms = [arm("grpo", scores(1, num_seeds=2)), arm("cispo", scores(2, 0.4, num_seeds=2))]
    alone, comparison = compare(arms[:1]), compare(arms)
    assert conclusion(alone).startswith("grpo scores 0.5")
    assert basis(alone).endswith(", 2 seeds.")
    assert alone.notes[0].startswith("Fewer than 3 seeds of grpo: ")
    assert comparison.notes[0].startswith("Fewer than 3 seeds of every arm: ")
    assert {r.decision for r in comparison.others} == {"open"}
    assert describe_power(comparison) == "Decisions need at least 3 seeds of each arm."
    (other,) = compare([arms[0], arm("gspo", scores(3, 0.4))]).others  # the baseline has 2 seeds
    assert (other.decision, other.scores.num_seeds) == ("open", 5)


def test_finished_runs_that_cannot_be_compared_are_left_out_and_named(three_arms):
    odd = (run([0.5] * 16, name="asked", env="add"), run(name="bare"))
    unscored = run([None] * 9 + [0.5] * 7, name="unscored")
    three_arms[2] = replace(three_arms[2], runs=(*three_arms[2].runs, unscored))
    comparison = compare([*three_arms, Arm("odd", "odd", odd)])
    assert [result(comparison, one.name).lost for one in three_arms] == [(), (), (unscored,)]
    assert left_out(comparison) == {
        "asked": "its questions differ from those of grpo",
        "bare": "it has no evaluation",
        "unscored": "most of its questions have no score",
    }
    assert len(comparison.results) == 3
    assert len(comparison.scoring.questions) == NUM_QUESTIONS


def test_a_question_that_one_run_lacks_is_compared_for_no_run(three_arms):
    unscored = Arm("a", "a", (run([0.5, 0.5, 0.5, None] + [0.5] * 12),))
    comparison = compare([*three_arms, unscored])
    examples = {question.example for question in comparison.scoring.questions}
    assert examples == {str(q) for q in range(16)} - {"3"}
    # A run with half of the questions is still compared.
    comparison = compare([*three_arms, Arm("a", "a", (run([0.5] * 8),))])
    assert len(comparison.scoring.questions) == 8
    assert any("Only the 8 questions" in note for note in comparison.notes)


def test_the_questions_are_those_of_most_finished_runs_of_the_baseline():
    counts = (6, 16, 16, 6, 6, 6)
    runs = [run([0.5] * n, seed=i, cause="stopped" * (i > 2)) for i, n in enumerate(counts)]
    comparison = compare([Arm("a", "a", tuple(runs))])
    assert len(comparison.scoring.questions) == 16
    assert comparison.left_out[-1] == (runs[0], "its questions differ from those of a")


def test_runs_with_different_code_are_named_also_in_different_arms(three_arms):
    runs = three_arms[0].runs
    same = {"losses/a.py": ("1",), "losses/b.py": ("1",)}
    edited = {"losses/a.py": ("2",), "mine.py": ("1",)}  # b.py is unknown: another dry call
    codes = [same, same, edited, edited, edited]
    own = tuple(replace(one, code=code) for one, code in zip(runs, codes, strict=True))
    three_arms[0] = replace(three_arms[0], runs=own)
    code = {"c.py": ("1", "2"), "mine.py": ("2",), "losses/b.py": ("1",)}
    others = tuple(replace(one, code=code, commit="abc") for one in three_arms[1].runs)
    three_arms[1] = replace(three_arms[1], runs=others)  # resumed with other code
    notes = [note for note in compare(three_arms).notes if "different versions" in note]
    assert notes == [
        "The runs used different versions of c.py, losses/a.py, mine.py: compare the copies in "
        "code/ of their folders."
    ]
    assert not any("commits" in note for note in compare(three_arms).notes)  # one commit is known
    last = replace(three_arms[2], runs=(replace(three_arms[2].runs[0], commit="0123456789"),))
    assert "The runs used 2 commits: 0123456, abc." in compare([*three_arms[:2], last]).notes


def test_excluded_runs_are_grouped_by_cause_the_most_frequent_first(three_arms):
    runs = [run(name=f"s-{step}", cause=f"stopped after step {step}") for step in (5, 6, 7)]
    runs += [run(name=f"bare-{number}") for number in range(2)]
    expected = "Excluded runs (5): bare-0 and 1 more: it has no evaluation; "
    expected += "s-5: stopped after step 5; s-6: stopped after step 6"
    assert expected in compare([*three_arms, Arm("a", "a", tuple(runs))]).notes


def test_an_arm_without_any_reward_cannot_be_the_baseline():
    bare = Arm("loss=sft", "sft", (run(name="one"), run(name="two")))
    with pytest.raises(NothingToCompare, match="neither an evaluation nor a training reward"):
        compare([bare])
    arms = [bare, arm("grpo", rewards=(0.5, 0.6))]
    comparison = compare(arms)
    assert [one.arm.name for one in comparison.results] == ["grpo"]
    evaluated = compare([*arms, arm("cispo", scores(1))])  # preferred to an arm with rewards
    assert evaluated.baseline.arm.name == "cispo"
    assert left_out(comparison) == dict.fromkeys(("one", "two"), "it has no reward")
    with pytest.raises(NothingToCompare, match="sft has neither"):
        compare(arms, baseline="loss=sft")


def test_questions_are_paired_between_arms():
    """Questions differ by much more than arms do, so unpaired arms could not be told apart."""
    rng = np.random.default_rng(0)
    difficulty, arms = rng.uniform(0, 1, NUM_QUESTIONS), []
    for loss, gain in (("grpo", 0.0), ("cispo", 0.02)):
        arms.append(arm(loss, [difficulty + gain + rng.normal(0, 0.002) for _ in range(3)]))
    found = result(compare(arms), "cispo").difference
    assert 0.01 < found.low < 0.02 < found.high < 0.03
