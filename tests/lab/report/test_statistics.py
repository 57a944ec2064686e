"""The statistics compared with results by hand, with scipy, and by simulation."""

import numpy as np
import pytest
from scipy import stats

from lab.report import power
from lab.report import statistics as st
from lab.report.sequential import State, decide_arms, decision_of, radius, radius_of
from lab.report.statistics import OPEN, Interval, Spread


def scores(y, strata=None):
    y = np.asarray(y, float)
    return st.Scores(y, np.zeros(y.shape[1], int) if strata is None else np.asarray(strata))


def simulated(rng, num_seeds, num_questions, *, seeds, questions, noise, gain=0.0):
    """Return two arms on the same questions; the first one is better by `gain`."""
    difficulty = rng.normal(0.5, 0.3, num_questions)
    made = [
        difficulty
        + rng.normal(0, questions, num_questions)
        + rng.normal(0, seeds, (num_seeds, 1))
        + rng.normal(0, noise, (num_seeds, num_questions))
        for _ in range(2)
    ]
    return scores(made[0] + gain), scores(made[1])


def compared(one, base, rng, num_draws=400):
    """Return the difference of an arm to another one, and the decision."""
    questions = st.question_weights(one.strata, rng, num_draws)
    weights = [st.seed_weights(arm.num_seeds, rng, num_draws) for arm in (one, base)]
    drawn, of_base = [
        st.draw_scores(a, w, questions) for a, w in zip((one, base), weights, strict=True)
    ]
    value, spread = float(one.y.mean() - base.y.mean()), st.spread_of(one, base)
    difference = st.interval(value, drawn - of_base, spread)
    return difference, st.decide(difference, st.p_value(value, spread))


@pytest.mark.parametrize(("num_seeds", "num_questions"), [(8, 1), (1, 40)])
def test_resampled_one_way_the_draws_are_those_of_scipy(num_seeds, num_questions):
    rng = np.random.default_rng(0)
    arm = scores(rng.normal(0, 1, (num_seeds, num_questions)) ** 2)
    num, seeds = 40_000, st.seed_weights(num_seeds, rng, 40_000)
    drawn = st.draw_scores(arm, seeds, st.question_weights(arm.strata, rng, num))
    y = (arm.y.ravel(),)
    reference = stats.bootstrap(y, np.mean, n_resamples=num, method="percentile", rng=1)
    low, high = reference.confidence_interval
    ends = pytest.approx([low, high], abs=0.02 * (high - low))
    assert np.quantile(drawn, [0.025, 0.975]) == ends
    assert drawn.std() == pytest.approx(reference.standard_error, rel=0.02)


def test_with_one_question_the_interval_is_that_of_students_t():
    y = np.array([0.1, 0.5, 0.3, 0.4, 0.25, 0.35])
    spread = st.spread_of(scores(y[:, None]))
    assert spread.standard_error == pytest.approx(stats.sem(y))
    assert spread.degrees_of_freedom == pytest.approx(5)
    low, high = stats.t.interval(0.95, 5, y.mean(), stats.sem(y))
    rng = np.random.default_rng(0)
    seeds, questions = st.seed_weights(6, rng), st.question_weights(np.zeros(1, int), rng)
    draws = st.draw_scores(scores(y[:, None]), seeds, questions)
    ours = st.interval(float(y.mean()), draws, spread)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.02)
    assert st.student_quantile(4, 0.975) == pytest.approx(stats.t.ppf(0.975, 4))
    assert st.student_quantile(np.inf, 0.975) == pytest.approx(stats.norm.ppf(0.975))


def test_with_one_seed_the_p_value_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    one, two = rng.normal(0.5, 0.3, (2, 1, 30))
    spread = st.spread_of(scores(one), scores(two))
    p = st.p_value(float((one - two).mean()), spread)
    assert p == pytest.approx(stats.ttest_rel(one[0], two[0]).pvalue)


def test_with_one_question_the_p_value_is_that_of_welch():
    rng = np.random.default_rng(0)
    one, two = rng.normal(0.5, 0.1, (6, 1)), rng.normal(0.6, 0.2, (4, 1))
    spread = st.spread_of(scores(one), scores(two))
    reference = stats.ttest_ind(one, two, equal_var=False)
    assert spread.degrees_of_freedom == pytest.approx(float(reference.df[0]))
    p = st.p_value(float(one.mean() - two.mean()), spread)
    assert p == pytest.approx(float(reference.pvalue[0]))


def test_the_terms_of_the_spread_by_hand():
    # Seeds 1 and 3 and 5 above a question, columns 0 and 2 apart, and one residual pattern.
    y = np.array([[1.0, 3.0], [3.0, 5.0], [5.0, 9.0]])
    arm = scores(y)
    # means of seeds 2, 4, 7: variance 19/3; over 3 seeds
    assert arm.between_seeds == pytest.approx(19 / 9)
    # residuals: +-1/3, +-1/3, -+2/3, squares 2 * (1 + 1 + 4) / 9 = 4/3 over (3-1)(2-1), over S Q
    assert arm.noise == pytest.approx(4 / 3 / 2 / 6)
    # means of questions 3 and 17/3: variance (8/3)^2 / 2, over 2
    assert st.spread_of(arm).questions == pytest.approx((8 / 3) ** 2 / 4)
    assert st.spread_of(arm).variance == pytest.approx(19 / 9 + 16 / 9 - 1 / 9)


def test_one_question_per_environment_and_one_seed_have_no_interval():
    for strata in ([0], [0, 1]):
        one, other = (st.Scores(np.full((1, len(strata)), y), np.array(strata)) for y in (0.5, 0.4))
        spread = st.spread_of(one, other)
        ours = st.interval(0.1, np.full(10, 0.1), spread)
        assert np.isnan(ours.low)
        assert np.isnan(st.p_value(0.1, spread))
        assert st.decide(ours, float("nan")) == st.OPEN
        assert power.seeds_needed(0.1, spread) is None
    four = st.Scores(np.array([[0.2, 0.4, 0.6, 0.8]]), np.array([0, 0, 1, 1]))
    assert st.spread_of(four).degrees_of_freedom == 2


def test_questions_are_drawn_within_their_environment():
    strata = np.array([0, 0, 0, 1])
    rng = np.random.default_rng(0)
    weights = st.question_weights(strata, rng, 100)
    assert np.allclose(weights[:, 3], 1 / 4)
    assert np.allclose(weights.sum(1), 1)
    # Three seeds are resampled, two are not.
    assert np.unique(st.seed_weights(3, rng, 100)) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert np.unique(st.seed_weights(2, rng, 100)) == 0.5
    # Environments are not drawn, so their differences add nothing to the spread.
    flat = scores([[0, 0, 0, 9]] * 3, strata)
    assert st.spread_of(flat).variance == 0


def test_without_any_variance_the_p_value_is_0_or_1():
    high, low = scores(np.ones((3, 4))), scores(np.zeros((3, 4)))
    assert st.p_value(1.0, st.spread_of(high, low)) == 0
    assert st.p_value(0.0, st.spread_of(high, high)) == 1
    ours = st.interval(1.0, np.full(10, 1.0), st.spread_of(high, low))
    assert st.decide(ours, 0.0) == st.BETTER


def test_a_decision_needs_both_the_interval_and_the_adjusted_p():
    assert st.decide(st.Interval(0.2, 0.1, 0.3), 0.01) == st.BETTER
    assert st.decide(st.Interval(-0.2, -0.3, -0.1), 0.01) == st.WORSE
    assert st.decide(st.Interval(0.2, 0.1, 0.3), 0.05) == st.OPEN
    for low, high in ((-0.01, 0.3), (0.0, 0.3), (-0.3, 0.0)):
        assert st.decide(st.Interval((low + high) / 2, low, high), 0.01) == st.OPEN


def test_the_chance_of_being_better_by_hand():
    # 2 beats 1, ties with 2, loses to 3; 3 beats two and ties with one: (1.5 + 2.5) / 6
    assert st.chance_better(np.array([2.0, 3.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 3)
    assert st.chance_better(np.ones(2), np.ones(3)) == 0.5


def test_holm_by_hand():
    # sorted 0.01 0.02 0.03 0.04 times 4 3 2 1: 0.04 0.06 0.06 0.04, and never below the one before
    assert st.adjust_by_holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert st.adjust_by_holm([0.7, 0.6]) == [1.0, 1.0]
    assert st.adjust_by_holm([]) == []
    unknown, known = st.adjust_by_holm([float("nan"), 0.02])
    assert np.isnan(unknown)
    assert known == 0.02  # an unknown p-value does not count


@pytest.mark.parametrize(
    ("num_seeds", "seeds", "questions", "noise"),
    [(3, 0.05, 0.0, 0.05), (5, 0.03, 0.1, 0.2), (5, 0.0, 0.0, 0.2), (10, 0.02, 0.05, 0.3)],
    ids=["seeds differ", "all differ", "noise alone", "ten seeds"],
)
def test_intervals_cover_the_true_difference_at_their_level(num_seeds, seeds, questions, noise):
    rng, num, covered = np.random.default_rng(5), 600, 0
    design = {"seeds": seeds, "questions": questions, "noise": noise, "gain": 0.1}
    for _ in range(num):
        ours, _ = compared(*simulated(rng, num_seeds, 48, **design), rng, 300)
        covered += ours.low <= 0.1 <= ours.high
    assert 0.92 <= covered / num <= 0.97


def test_the_smallest_visible_difference_is_found_with_chance_0_8():
    rng = np.random.default_rng(0)
    design = {"num_seeds": 5, "num_questions": 48, "seeds": 0.03, "questions": 0.02, "noise": 0.2}
    # Estimated from a sweep of its own each time; here their median stands for the design.
    visible = np.median(
        [power.visible_difference(st.spread_of(*simulated(rng, **design))) for _ in range(200)]
    )
    runs = [compared(*simulated(rng, gain=visible, **design), rng)[1] for _ in range(300)]
    assert 0.72 <= np.mean([decision == st.BETTER for decision in runs]) <= 0.9


def test_with_the_needed_seeds_the_difference_is_visible():
    rng = np.random.default_rng(1)
    arms = simulated(rng, 5, 48, seeds=0.05, questions=0.0, noise=0.2)
    spread = st.spread_of(*arms)
    needed = int(power.seeds_needed(0.05, spread, 3) or 0)
    assert needed > 5
    assert power.visible_difference(spread.with_seeds(needed), 3) <= 0.05
    assert power.visible_difference(spread.with_seeds(needed - 1), 3) > 0.05
    assert power.seeds_needed(1e-6, spread) == np.inf  # seeds do not help against the questions
    assert power.seeds_needed(0.0, spread) is None
    assert power.seeds_needed(100.0, spread) == 3  # the fewest seeds of a decision


def test_more_seeds_reduce_the_variance_between_seeds_alone():
    assert st.Spread(((0.04, 4),), 0.0, 0.0, 0).with_seeds(16).variance == pytest.approx(0.01)
    both = st.Spread(((0.04, 4), (0.08, 2)), 0.03, 0.01, 9).with_seeds(16)
    assert both.variance == pytest.approx(0.01 + 0.01 + 0.02)
    assert both.seeds == ((pytest.approx(0.01), 16), (pytest.approx(0.01), 16))
    # An estimate of V below A or C, or of C below R, is due to chance.
    assert st.Spread(((0.01, 3),), 0.04, 0.03, 9).variance == 0.04
    assert st.Spread(((0.04, 3),), 0.01, 0.03, 9).variance == 0.04
    assert st.Spread(((0.04, 3),), 0.01, 0.03, 9).with_seeds(12).questions == 0


def test_the_interquartile_mean_is_scipys():
    values = np.random.default_rng(0).normal(0, 1, 22)
    assert st.interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))
    # two environments, four seeds: of 0 1 2 3 and 10 11 12 30 the middle half is 2 3 10 11
    arm = scores([[0, 10], [1, 11], [2, 12], [3, 30]], [0, 1])
    ours = st.interquartile_interval(arm, np.random.default_rng(0))
    assert ours.value == 6.5
    assert ours.low < 6.5 < ours.high


def test_the_radius_is_the_linear_boundary_with_known_variance_and_wider_with_few_seeds():
    by_hand = 0.05 + 0.001 * np.log(2 / 0.05) / 0.1
    assert radius(0.001, np.inf, 1000, 0.1, 0.05) == pytest.approx(by_hand)
    assert radius(0.001, 4.0, 1000, 0.1, 0.05) > 1.3 * by_hand
    assert radius(0.0, 4.0, 3, 0.1, 0.05) < 1e-9  # equal seeds are no reason to stay open
    # Far below delta, the level is raised, because few seeds cannot estimate the smallest tails.
    assert radius(1e-6, 4.0, 3, 0.1, 0.05) < 0.05
    spread = Spread(((1e-5, 3), (1e-5, 20)), 3e-6, 2e-6, 9)  # the arm with fewer seeds counts
    of_three = radius(2.1e-5, spread.decision_degrees_of_freedom, 3, 0.1, 0.05)
    assert radius_of(spread, 0.1, 0.05) == pytest.approx(of_three)


def test_an_interval_that_ends_at_the_smallest_effect_is_equal_and_one_that_ends_at_0_is_open():
    ends = {(-0.1, 0.1): "equal", (0.0, 0.2): OPEN, (-0.2, 0.0): OPEN, (-0.11, -0.01): "worse"}
    assert [decision_of(*one, 0.1) for one in ends] == list(ends.values())


def test_the_seeds_of_an_open_arm_depend_on_the_size_of_its_difference_and_not_on_the_sign():
    spread = Spread(((0.04, 3), (0.04, 3)), 0.0, 0.0, 0)
    gains = (0.3, -0.3, 0.05, 0.0)
    states = (State(Interval(gain, np.nan, np.nan), 0.1, 0.05, OPEN, spread) for gain in gains)
    plus, minus, small, zero = (state.seeds_needed or 0 for state in states)
    # Below the smallest effect, the true difference may be 0.
    assert 0 < plus == minus < small == zero


def test_with_known_variance_few_paths_ever_leave_the_boundary():
    rng, counts = np.random.default_rng(0), np.arange(1, 301)
    common = rng.normal(0, 0.02, (4000, 1))  # noise of the questions, which seeds do not reduce
    paths = common + rng.normal(0, 0.3, (4000, 300)).cumsum(1) / counts
    radii = radius(0.02**2 + 0.3**2 / counts, np.inf, 10**6, 0.1, 0.05)
    left = (np.abs(paths) > radii).any(1).mean()
    assert 0.02 < left < 0.05


def test_arms_are_better_worse_equal_or_open_and_a_decision_stays():
    rng = np.random.default_rng(1)
    y = rng.normal(0, 0.004, (5, 8, 20))
    y[1] += 0.05
    y[2] -= 0.05
    y[4] += rng.normal(0, 0.2, (8, 1))
    states = decide_arms([*map(scores, y)], 0, 0.03)
    assert [one.decision for one in states[1:]] == ["better", "worse", "equal", "open"]
    assert (states[4].seeds_needed or 0) > 8
    later = y.copy()
    later[1, 7] -= 10.0  # one more seed that would change the difference
    assert decide_arms([*map(scores, later)], 0, 0.03)[1] == states[1]
    wide = decide_arms([*map(scores, y)], 0, 0.2)[1]
    assert wide.decision == "equal"  # because equal wins over better


def test_the_last_arm_has_the_whole_error_once_the_others_are_decided():
    rng = np.random.default_rng(2)
    y = rng.normal(0, 0.01, (3, 6, 20))
    y[1] += 0.1
    y[2] += rng.normal(0.02, 0.08, (6, 1))
    state = decide_arms([*map(scores, y)], 0, 0.03)[2]
    assert (state.decision, state.error) == (OPEN, 0.05)
    half = radius_of(state.spread, 0.03, 0.05)
    assert state.difference.high - state.difference.value == pytest.approx(half)


def test_arms_without_enough_seeds_keep_their_share_of_the_error():
    y = np.random.default_rng(0).normal(0, 0.01, (2, 6, 20))
    short = scores(y[1, :2])
    alone = decide_arms([*map(scores, y)], 0, 0.001)[1]
    assert decide_arms([*map(scores, y), short], 0, 0.001)[1].error == alone.error / 2
    assert decide_arms([*map(scores, y)], 0, 0.001, num_unscored=3)[1].error == alone.error / 4
