"""Compared runs: the numbers computed again by other means, and decisions with missing data."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from scipy import stats

from lab.report.arms import Arm
from lab.report.comparison import NoBaseline, NothingToCompare, compare
from lab.report.conclusion import basis, conclusion, describe_power, ended_early, headline
from lab.report.evaluations import Evaluation, Question
from lab.report.missing import assumptions
from lab.report.run import Curve, Run
from lab.report.scoring import HELD_OUT, TRAINING, mean_scores
from lab.report.statistics import Interval
from rl.runtime.sweep_folder import NOT_STARTED

NUM_QUESTIONS = 16


def run(y=None, *, name="run", env="reverse", rewards=(), **keywords) -> Run:
    """Return a run with a score or rewards by question, or with the rewards of its steps."""
    evaluations = {}
    if y is not None:
        questions = [Question(env, str(index), f"{env} {index}") for index in range(len(y))]
        asked = [score if isinstance(score, list) else [score] for score in y]
        evaluations = {20: Evaluation(dict(zip(questions, asked, strict=True)))}
    steps = np.arange(len(rewards), dtype=float)
    training = Curve(steps, 3 * steps, 100 * steps, np.array(rewards, float))
    return Run(name=name, evaluations=evaluations, training=training, **keywords)


def arm(name, y=None, rewards=()) -> Arm:
    """Return an arm with scores y [S, Q], or with the same reward in all steps of a run."""
    runs = [run(of_seed, name=f"{name}-s{seed}", seed=seed) for seed, of_seed in enumerate(y or ())]
    runs += [run(rewards=[x] * 20, name=name, seed=seed) for seed, x in enumerate(rewards)]
    return Arm(f"loss={name}", name, tuple(runs))


def scores(seed, gain=0.0, num_seeds=5):
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.02, (num_seeds, 1)) + rng.normal(0, 0.02, (num_seeds, NUM_QUESTIONS))
    return (0.5 + gain + noise).tolist()


def result(comparison, name):
    return next(one for one in comparison.results if one.arm.name == name)


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


def test_a_comparison_without_a_run_that_counts_is_refused():
    for arms, baseline, problem in (
        ([Arm("a", "a", (run(cause="stopped"),))], "", "finished .run: stopped.: finish one"),
        ([arm("a", scores(1))], "b", "baseline=b is not an arm: choose one of loss=a"),
        ([arm("a", scores(1)), Arm("x", "x", (run(cause="stopped"),))], "x", "no run of baseline="),
    ):
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


def test_the_training_reward_is_that_of_the_last_steps():
    assert run(rewards=range(20)).training_reward == 14.5
    smooth = run(rewards=range(20)).training.smoothed(4)
    assert smooth.scores[[0, 1, 2, 3, 19]] == pytest.approx([0, 0.5, 1, 1.5, 17.5])


def test_notes_name_equal_scores_different_steps_and_examples_chosen_by_rewards():
    def notes(selects_examples=False, steps=(1, 1), scores=(0.25, 0.5)):
        numbers = enumerate(zip(steps, scores, strict=True))
        runs = [run(rewards=[x] * n, num_steps=n, seed=i) for i, (n, x) in numbers]
        runs[1] = replace(runs[1], selects_examples=selects_examples)
        return " ".join(compare([Arm(str(i), str(i), (one,)) for i, one in enumerate(runs)]).notes)

    for one, text in (
        ({"selects_examples": True}, "chose examples or rollouts by rewards"),
        ({"steps": (1, 4)}, "scored at different steps, so compare with care: 0 at 0, 1 at 3."),
        ({"scores": (0.5, 0.5)}, "Every score of every run is 0.5. "),
    ):
        assert (text in notes(), text in notes(**one)) == (False, True)


def test_with_fewer_than_three_seeds_no_arm_is_called_better():
    arms = [arm("grpo", scores(1, num_seeds=2)), arm("cispo", scores(2, 0.4, num_seeds=2))]
    comparison = compare(arms)
    assert conclusion(compare(arms[:1])).startswith("grpo scores 0.5")
    assert comparison.notes[0].startswith("Fewer than 3 seeds of every arm: ")
    assert {r.decision for r in comparison.others} == {"open"}
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
    same = {"a.py": ("1",), "b.py": ("1",)}  # b.py is unknown to the runs of another dry call
    for index, code in enumerate((same, {"a.py": ("2",)}, {"c.py": ("1", "2")})):  # c.py: resumed
        runs = tuple(replace(one, code=code) for one in three_arms[index].runs)
        three_arms[index] = replace(three_arms[index], runs=runs)
    only_first, *others = three_arms[0].runs
    only_first = replace(only_first, code={**same, "d.py": ("1",)})
    three_arms[0] = replace(three_arms[0], runs=(only_first, *others))
    (note,) = [note for note in compare(three_arms).notes if "different versions" in note]
    assert note.startswith("The runs used different versions of a.py, c.py, d.py, or some runs ")


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


def test_questions_are_paired_between_arms():
    """Questions differ by much more than arms do, so unpaired arms could not be told apart."""
    rng = np.random.default_rng(0)
    difficulty, arms = rng.uniform(0, 1, NUM_QUESTIONS), []
    for loss, gain in (("grpo", 0.0), ("cispo", 0.02)):
        arms.append(arm(loss, [difficulty + gain + rng.normal(0, 0.002) for _ in range(3)]))
    found = result(compare(arms), "cispo").difference
    assert 0.01 < found.low < 0.02 < found.high < 0.03


def test_many_arms_are_counted_and_the_best_is_named():
    names = [f"a_long_name_of_an_arm_{index}" for index in range(6)]
    gains = (0.0, 0.2, 0.3, -0.2, 0.0, 0.1)
    text = headline(compare([arm(names[i], scores(i, gain)) for i, gain in enumerate(gains)]))
    assert text.startswith(f"5 arms against {names[0]}: 3 better (best: {names[2]}, by 0.")
    assert text.endswith("), 1 worse, 1 open.")


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(1000.0, "about 1000 seeds of each arm."), (4000.0, "more than 1,000 seeds of each arm."),
     (inf, "more questions, not more seeds.")],
)  # fmt: skip
def test_the_seeds_that_a_negative_difference_needs_are_named(needed, expected):
    comparison = compare([arm("grpo", scores(1)), arm("dapo", scores(3))])
    below = Interval(-0.25, -0.3, 0.1)
    dapo = replace(result(comparison, "dapo"), seeds_needed=needed, difference=below)
    text = describe_power(replace(comparison, results=(comparison.baseline, dapo)))
    assert text.endswith(f"truly differs by the observed -0.25, a decision needs {expected}")


MANY = 40  # questions


def answers(rng, right, num_seeds=8, lost=None):
    """Return the rewards of four rollouts per question, with some lost: None for 0 or for 1."""
    y = (rng.random((num_seeds, MANY, 4)) < right).astype(float)
    gone = (y == lost) & (rng.random(y.shape) < 0.5)
    return np.where(gone, None, y).tolist()


def two_arms(cispo, grpo, **options):
    """Return the comparison of cispo with grpo, given rewards by seed, question and rollout."""
    return compare([arm("grpo", grpo), arm("cispo", cispo)], **options)


@pytest.mark.parametrize(("lost", "counted"), [(0.0, "lowest"), (1.0, "highest")])
def test_unscored_rollouts_do_not_make_an_equal_arm_better_or_worse(lost, counted):
    rng = np.random.default_rng(0)
    comparison = two_arms(answers(rng, 0.5, lost=lost), answers(rng, 0.5))
    cispo = result(comparison, "cispo")
    assert not cispo.difference.low <= 0 <= cispo.difference.high
    assert cispo.p_value < 0.05
    assert (cispo.decision, cispo.num_rollouts) == ("open", 8 * MANY * 4)
    assert cispo.undecided_if == f"unscored rollouts get the {counted} reward"
    assert f"left out: cispo {cispo.num_unscored} of 1280." in " ".join(comparison.notes)
    assert (cispo.seeds_needed, describe_power(comparison)) == (None, "")  # seeds do not help


def test_a_sequential_decision_must_hold_under_each_assumption_too():
    rng = np.random.default_rng(0)
    rewards = answers(rng, 0.5, lost=0), answers(rng, 0.5)
    comparison = two_arms(*rewards, smallest_effect=0.05)
    cispo = result(comparison, "cispo")
    assert (cispo.decision, cispo.difference.low > 0) == ("open", True)
    assert "because the result would change if unscored rollouts get the" in comparison.notes[-1]
    assert 8 < (cispo.seeds_needed or 0) < inf
    other = result(two_arms(*rewards, smallest_effect=0.2), "cispo")  # the lowest make it equal
    assert (other.decision, other.seeds_needed) == ("open", inf)


def test_a_difference_larger_than_the_unscored_rollouts_allow_is_still_decided():
    rng = np.random.default_rng(0)
    rewards = answers(rng, 0.8)
    rewards[0][0][0] = rewards[3][7][2] = None
    assert result(two_arms(rewards, answers(rng, 0.4)), "cispo").decision == "better"


def test_a_question_without_any_score_counts_under_the_assumptions():
    """Every answer to half of the questions is lost, so only the other half is compared."""
    rng = np.random.default_rng(0)
    easy_first = np.repeat([0.9, 0.1], MANY // 2)[:, None]
    known, lost = answers(rng, easy_first), answers(rng, easy_first)
    for of_seed in lost:
        of_seed[MANY // 2 :] = [[None] * 4] * (MANY // 2)
    comparison = two_arms(lost, known)
    assert len(comparison.scoring.questions) == MANY // 2
    assert result(comparison, "cispo").decision == "open"


def test_missing_scores_are_assumed_by_environment_and_runs_keep_their_order():
    first, last = run([[0.2, 0.8], [0.4, None]], env="a", seed=0), run([0.9, 0.7], env="a", seed=2)
    for one, reward in ((first, 5.0), (last, 7.0)):
        one.evaluations[20].rewards.update(run([reward], env="b").evaluations[20].rewards)
    lost = run([0.3], env="a", seed=1, cause="vLLM is gone")
    comparison = compare([Arm("x", "x", (first, lost, last))])
    of_last = [0.9, 0.7, 7.0]
    assert [arms[0].y.ravel().tolist() for _, arms in assumptions(comparison.scoring)] == [
        pytest.approx([0.5, 0.3, 5.0, *of_last]),  # the lowest reward: 0.2 in a, 5 in b
        pytest.approx([0.5, 0.65, 5.0, *of_last]),
        pytest.approx([0.5, 0.4, 5.0, *[0.3, 0.2, 5.0], *of_last]),
        # The last run scores 0.2, 0.15 and 1 above the mean of both runs.
        pytest.approx([0.5, 0.4, 5.0, *[1.1, 0.85, 8.0], *of_last]),
    ]


def test_a_question_that_one_of_two_judged_versions_could_not_score_has_no_score():
    first, last = (run(rewards).evaluations[20] for rewards in ([1.0, [None]], [0.5, 0.5]))
    judged = replace(run(), evaluations={10: first, 20: last})
    assert [q.example for q in mean_scores(judged, 2)] == ["0"]
    assert list(mean_scores(judged, 2).values()) == [0.75]
    assert len(mean_scores(judged, 1)) == 2


def test_runs_with_one_seed_are_averaged_and_count_as_one_seed():
    cispo, grpo = scores(2, 0.1, 3), scores(1, num_seeds=3)
    few, more = arm("cispo", cispo), arm("cispo", np.add(cispo, 0.02).tolist())
    once = compare([arm("grpo", grpo), few])
    twice = compare([arm("grpo", grpo), replace(few, runs=(*few.runs, *more.runs))])
    one, both = result(once, "cispo"), result(twice, "cispo")
    assert (both.scores.num_seeds, len(both.runs)) == (3, 6)
    assert both.p_value == pytest.approx(result(once, "cispo").p_value, rel=0.5)
    assert both.score.value == pytest.approx(one.score.value + 0.01)
    assert "3 seeds each (3 to 6 runs)" in basis(twice)
    kept = [score for one in twice.results for score in one.run_scores.tolist()]
    assert len(set(kept)) == 9


def with_early_ends(whole, ended, *, share=1.0):
    """Return the arm whose runs `ended` stopped at `share` of their score, or unevaluated at 0."""
    runs = []
    for one in whole.runs:
        if one.seed in ended:
            last = [[share * score] for score in one.evaluations[20].scores.values()]
            early = run(last if share else None, name=one.name, seed=one.seed, cause="vLLM is gone")
            one = replace(early, evaluations={10: early.evaluations[20]} if share else {})
        runs.append(one)
    return replace(whole, runs=tuple(runs))


def by_mean(whole):
    """Return the seeds of the arm, the worst run first."""
    means = {one.seed: np.mean([*one.evaluations[20].scores.values()]) for one in whole.runs}
    return sorted(means, key=means.__getitem__)


def spread_scores(seed, gain=0.0):
    rng = np.random.default_rng(seed)
    return (0.5 + gain + rng.normal(0, 0.05, (10, 1)) + rng.normal(0, 0.02, (10, 40))).tolist()


@pytest.mark.parametrize(
    ("ended", "share"),
    [(slice(0, 3), 0.9), (slice(0, 3), 0.0), (slice(7, 10), 0.9)],
    ids=["the worst", "the worst, unevaluated", "the best"],
)
def test_runs_that_ended_early_do_not_make_an_equal_arm_better_or_worse(ended, share):
    def comparison(seed):
        whole = arm("cispo", spread_scores(100 + seed))
        cut = with_early_ends(whole, by_mean(whole)[ended], share=share)
        return compare([arm("grpo", spread_scores(200 + seed)), cut])

    comparisons = map(comparison, range(50))
    claimed = next(one for one in comparisons if result(one, "cispo").p_value < 0.05)
    cispo = result(claimed, "cispo")
    assert cispo.undecided_if.startswith("lost runs get ")
    assert cispo.decision == "open"
    assert conclusion(claimed).endswith("Ended early: 3 of 20 runs, of cispo.")


def test_a_large_difference_is_decided_although_a_run_ended_early():
    better = with_early_ends(arm("cispo", spread_scores(2, 0.2)), [4], share=0.9)
    for arms in ([arm("grpo", spread_scores(1)), better], [better, arm("grpo", spread_scores(1))]):
        (other,) = compare(arms).others
        assert other.decision == ("better" if other.arm.name == "cispo" else "worse")


def test_runs_that_ended_early_count_by_their_last_training_reward():
    grpo = arm("grpo", rewards=(0.5, 0.51, 0.52, 0.53))
    cispo = arm("cispo", rewards=(0.7, 0.71, 0.72))
    for last, decision in ((0.69, "better"), (0.1, "open"), (None, "open")):
        early = run(rewards=[last] * 3 if last else (), seed=3, cause="stopped after step 3 of 20")
        comparison = compare([grpo, replace(cispo, runs=(*cispo.runs, early))])
        assert result(comparison, "cispo").decision == decision
        assert ended_early(comparison) == "Ended early: 1 of 8 runs, of cispo."


def test_runs_that_wait_or_go_on_or_were_repeated_did_not_end_early():
    cispo = arm("cispo", scores(2, 0.2))
    causes = {"waits": NOT_STARTED, "goes": "still going: step 2 of 9", "repeated": "vLLM is gone"}
    seeds = {"waits": 5, "goes": 6, "repeated": 0}
    more = [run(name=name, seed=seeds[name], cause=cause) for name, cause in causes.items()]
    comparison = compare([arm("grpo", scores(1)), replace(cispo, runs=(*cispo.runs, *more))])
    assert result(comparison, "cispo").lost == ()
    assert result(comparison, "cispo").decision == "better"
    assert comparison.notes[0].startswith("Runs that have not ended: 2. The p-values are valid")
    early = run(name="early", cause="vLLM is gone")  # its unknown seed repeats no other seed
    assert Arm("x", "x", (run([0.5]), early)).ended_early == [early]


def test_a_sweep_that_grew_is_judged_more_strictly_and_says_so():
    def arms(grown):
        for name, gain in (("grpo", 0.0), ("cispo", 0.05)):
            runs = enumerate(arm(name, scores(len(name), gain)).runs)
            yield Arm(name, name, tuple(replace(r, grown=min(i, grown)) for i, r in runs))

    few, many = (list(arms(number)) for number in (0, 3))
    planned, grown = compare(few), compare(many)
    once, often = (result(comparison, "cispo") for comparison in (planned, grown))
    assert often.p_value == pytest.approx(4 * 5 * once.p_value)
    for mixed in ([few[0], many[1]], [many[0], few[1]]):  # the looks at either arm count
        assert result(compare(mixed), "cispo").p_value == pytest.approx(often.p_value)
    assert (once.decision, often.decision) == ("better", "open")
    assert often.visible_difference > 1.5 * once.visible_difference
    assert (once.seeds_needed, often.seeds_needed) == (9, 12)  # at looks 2 and 5
    assert "Runs were added 3 times" in grown.notes[0]
    assert "multiplied by up to 20" in grown.notes[0]
