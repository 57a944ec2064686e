"""Decisions when rollouts could not be scored, runs ended early, seeds repeat or a sweep grew."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from benchmarks import verdicts
from lab.report.arms import Arm
from lab.report.comparison import compare
from lab.report.conclusion import basis, conclusion, describe_power, ended_early, headline
from lab.report.missing import assumptions
from lab.report.numbers import arm_records, table
from lab.report.scoring import mean_scores
from lab.report.statistics import Interval
from rl.runtime.sweep_folder import NOT_STARTED
from tests.support.compared_runs import arm, result, run, scores

NUM_QUESTIONS = 40


def answers(rng, right, num_seeds=8, lost=None):
    """Return the rewards of four rollouts per question, with some lost: None for 0 or for 1."""
    y = (rng.random((num_seeds, NUM_QUESTIONS, 4)) < right).astype(float)
    gone = (y == lost) & (rng.random(y.shape) < 0.5)
    return np.where(gone, None, y).tolist()


def two_arms(cispo, grpo, **options):
    """Return the comparison of cispo with grpo, given rewards by seed, question and rollout."""
    arms = [
        Arm(name, name, tuple(run(one, name=f"{name}-{s}", seed=s) for s, one in enumerate(y)))
        for name, y in (("grpo", grpo), ("cispo", cispo))
    ]
    return compare(arms, **options)


@pytest.mark.parametrize(("lost", "counted"), [(0.0, "lowest"), (1.0, "highest")])
def test_unscored_rollouts_do_not_make_an_equal_arm_better_or_worse(lost, counted):
    rng = np.random.default_rng(0)
    comparison = two_arms(answers(rng, 0.5, lost=lost), answers(rng, 0.5))
    cispo = result(comparison, "cispo")
    assert not cispo.difference.low <= 0 <= cispo.difference.high
    assert cispo.p_value < 0.05
    assert (cispo.decision, cispo.num_rollouts) == ("open", 8 * NUM_QUESTIONS * 4)
    assert cispo.undecided_if == f"unscored rollouts get the {counted} reward"
    notes = " ".join(comparison.notes)
    assert f"left out: cispo {cispo.num_unscored} of 1280." in notes
    assert "No decision about cispo, because the result would change if unscored" in notes
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
    easy_first = np.repeat([0.9, 0.1], NUM_QUESTIONS // 2)[:, None]
    known, lost = answers(rng, easy_first), answers(rng, easy_first)
    for of_seed in lost:
        of_seed[NUM_QUESTIONS // 2 :] = [[None] * 4] * (NUM_QUESTIONS // 2)
    comparison = two_arms(lost, known)
    assert len(comparison.scoring.questions) == NUM_QUESTIONS // 2
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


def test_examples_that_were_chosen_by_rewards_are_named_beside_training_rewards():
    arms = [arm(name, rewards=(0.5, 0.51, 0.52)) for name in ("grpo", "cispo")]
    one, *others = arms[0].runs
    chosen = [replace(arms[0], runs=(replace(one, selects_examples=True), *others)), arms[1]]
    texts = [" ".join(compare(of_kind).notes) for of_kind in (arms, chosen)]
    assert ["chose examples or rollouts by rewards" in text for text in texts] == [False, True]


def test_runs_that_wait_or_go_on_or_were_repeated_did_not_end_early():
    cispo = arm("cispo", scores(2, 0.2))
    causes = {"waits": NOT_STARTED, "goes": "still going: step 2 of 9", "repeated": "vLLM is gone"}
    seeds = {"waits": 5, "goes": 6, "repeated": 0}
    more = [run(name=name, seed=seeds[name], cause=cause) for name, cause in causes.items()]
    comparison = compare([arm("grpo", scores(1)), replace(cispo, runs=(*cispo.runs, *more))])
    assert ended_early(comparison) == ""
    assert result(comparison, "cispo").lost == ()
    assert result(comparison, "cispo").decision == "better"
    assert comparison.notes[0].startswith("2 runs have not ended: the p-values are valid only when")
    fewer = compare([arm("grpo", scores(1)), replace(cispo, runs=(*cispo.runs, more[0]))])
    assert fewer.notes[0].startswith("1 run has not ended: ")


def test_runs_of_many_arms_that_ended_early_are_counted_in_one_line():
    names = [f"a_long_name_of_an_arm_{index}" for index in range(6)]
    arms = [with_early_ends(arm(name, spread_scores(1)), range(i)) for i, name in enumerate(names)]
    text = ended_early(compare(arms))
    assert text == f"Ended early: 15 of 60 runs, 5 of them of {names[5]}."
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
    assert "Runs were added once" in compare(list(arms(1))).notes[0]
    assert "multiplied by up to 20" in grown.notes[0]
    assert not planned.notes


def test_what_is_visible_is_said_of_the_observed_difference():
    arms = [arm("grpo", scores(1)), arm("dapo", scores(3)), arm("gspo", scores(4))]
    comparison = compare(arms)
    needs = [(one.seeds_needed or inf, one.arm.name) for one in comparison.others]
    _, fewest = min(needs)
    sizes = sorted(one.visible_difference for one in comparison.others)
    text = describe_power(comparison)
    assert text.startswith(f"The smallest visible difference is {sizes[0]:.2g}")
    assert f"If {fewest} truly differs by the observed " in text
    assert text.endswith("seeds of each arm.")


@pytest.mark.parametrize(
    ("needed", "expected", "cell"),
    [
        (1000.0, "a decision needs about 1000 seeds of each arm.", "1,000"),
        (4000.0, "a decision needs more than 1,000 seeds of each arm.", "> 1,000"),
        (inf, "a decision needs more questions, not more seeds.", "more questions"),
        (None, "", "-"),
    ],
)
def test_only_a_known_difference_needs_a_number_of_seeds(needed, expected, cell):
    comparison = compare([arm("grpo", scores(1)), arm("dapo", scores(3))])
    below = Interval(-0.25, -0.3, 0.1)
    dapo = replace(result(comparison, "dapo"), seeds_needed=needed, difference=below)
    comparison = replace(comparison, results=(comparison.baseline, dapo))
    text = describe_power(comparison)
    assert text.endswith(expected)
    assert ("truly differs by the observed -0.25, " in text) == bool(expected)
    heads, *rows = table(arm_records(comparison, comparison.arms))
    shown = dict(zip(heads, next(row for row in rows if row[0] == "dapo"), strict=True))
    assert shown.get("seeds needed", "-") == cell


def test_arms_that_are_judged_at_different_versions_are_named():
    late = arm("dapo", scores(3))
    later = [replace(one, evaluations={30: one.evaluations[20]}) for one in late.runs[:2]]
    comparison = compare([arm("grpo", scores(1)), replace(late, runs=(*late.runs[2:], *later))])
    (note,) = [note for note in comparison.notes if "different policy versions" in note]
    assert note.endswith("grpo at 20, dapo at 20 to 30.")
    assert not compare([arm("grpo", scores(1))], num_judged=2).notes


def test_many_arms_are_counted_and_the_best_is_named():
    names = [f"a_long_name_of_an_arm_{index}" for index in range(6)]
    gains = (0.0, 0.2, 0.3, -0.2, 0.0, 0.1)
    arms = [arm(names[i], scores(i, gain)) for i, gain in enumerate(gains)]
    text = headline(compare(arms))
    assert text.startswith(f"5 arms against {names[0]}: 3 better (best: {names[2]}, by 0.")
    assert text.endswith("), 1 worse, 1 open.")
    equal = compare([arm(name, scores(i)) for i, name in enumerate(names)])
    assert headline(equal) == f"5 arms against {names[0]}: 5 open."
    two = [arm("a" * 90, scores(1)), arm("b" * 90, scores(2))]
    assert headline(compare(two)).startswith("1 arm against the baseline: 1 open")
    longest = [replace(one, name=f"{'x' * 40}{i}") for i, one in enumerate(arms)]
    assert headline(compare(longest)).startswith("5 arms against the baseline: 3 better (best: x")
    assert max(len(headline(compare(several))) for several in (arms, longest)) <= 120


@pytest.mark.parametrize("case", verdicts.CASES)
def test_few_simulated_sweeps_of_equal_arms_name_an_arm(case):
    """The benchmark measures the rates; this only shows that it runs."""
    assert sum(verdicts.judged(case, number) for number in range(4)) <= 1
