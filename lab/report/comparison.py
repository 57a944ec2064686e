"""Compare arms on the same questions: scores, differences to the baseline, decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np

from lab.report import power
from lab.report import statistics as st
from lab.report.arms import Arm
from lab.report.missing import assumptions
from lab.report.notes import notes_on
from lab.report.run import Run
from lab.report.scoring import ScoredArm, Scoring, score_arms
from lab.report.sequential import State, decide_arms

SEED = 0  # fixed seed of the bootstrap, so that equal runs give equal pages


class NothingToCompare(ValueError):
    """Raised if no comparison is possible. The message is for the user."""


class NoBaseline(ValueError):
    """Raised if the named arm cannot be the baseline. The message is for the user."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArmResult(ScoredArm):
    """The results of one arm, compared with the baseline. Unknown numbers are NaN."""

    score: st.Interval
    difference: st.Interval  # difference to the baseline's score
    p_value: float  # adjusted for the numbers of arms and looks; NaN in sequential decisions
    decision: str  # BETTER, WORSE, OPEN, BASELINE, or for example "equal within 0.03"
    undecided_if: str  # assumption about missing data that would change the decision, or ""
    chance_better: float
    visible_difference: float  # smallest true difference that is probably detected (power.py)
    seeds_needed: float | None  # per arm; None: not computed; inf: no number suffices
    interquartile: st.Interval | None  # interquartile mean; None with a single environment

    @property
    def minutes(self) -> float:
        return float(np.mean([run.seconds for run in self.runs])) / 60

    @property
    def reward(self) -> float:
        return self.score.value

    @property
    def scored_seeds(self) -> int:
        return self.scores.num_seeds


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    question: str  # the sweep's question, "" if it has none
    arms: tuple[Arm, ...]  # all arms, including arms without a scored run
    scoring: Scoring
    results: tuple[ArmResult, ...]
    baseline: ArmResult
    smallest_effect: float  # used in sequential decisions, 0 if decisions are not sequential
    left_out: tuple[tuple[Run, str], ...]  # excluded runs and the reasons
    notes: tuple[str, ...]  # warnings for the reader

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]

    @property
    def num_looks(self) -> int:
        """Return the highest number of looks at an arm (`Arm.num_looks`)."""
        return max(arm.num_looks for arm in self.arms)

    @property
    def others(self) -> list[ArmResult]:
        return [result for result in self.results if result is not self.baseline]

    @property
    def by_score(self) -> list[ArmResult]:
        return sorted(self.results, key=lambda result: -result.score.value)

    @property
    def has_intervals(self) -> bool:
        return any(isfinite(r.score.low) or isfinite(r.difference.low) for r in self.results)


def compare(
    arms: Sequence[Arm],
    *,
    baseline: str = "",
    question: str = "",
    smallest_effect: float = 0.0,
    num_judged: int = 1,
    notes: Sequence[str] = (),
    num_draws: int = st.NUM_DRAWS,
) -> Comparison:
    """Compare arms by their scores on the same held-out questions, or else by training reward.

    `baseline`: the name or the label of an arm, by default of the first arm with evaluations, else
    of the first with rewards. The last `num_judged` evaluations of each run are averaged. With a
    `smallest_effect`, decisions are sequential: they stay valid if an arm is judged after every
    seed. Raise NothingToCompare or NoBaseline.
    """
    control = _baseline(arms, baseline)
    scoring = score_arms(arms, control, num_judged)
    if not any(scored.arm is control for scored in scoring.arms):
        lacks = "neither an evaluation nor a training reward"
        if scoring.why_training:
            lacks = f"no training reward, and {scoring.why_training}"
        remedy = "" if scoring.why_training else ", or run with evaluation=default"
        raise NothingToCompare(f"{control.name} has {lacks}: choose another baseline{remedy}")
    num_unscored = len(arms) - len(scoring.arms)
    results = _arm_results(scoring, control, num_draws, smallest_effect, num_unscored)
    left_out = [(run, run.cause) for arm in arms for run in arm.runs if not run.finished]
    left_out += scoring.left_out
    return Comparison(
        question=question,
        arms=tuple(arms),
        scoring=scoring,
        results=tuple(results),
        baseline=next(result for result in results if result.arm is control),
        smallest_effect=smallest_effect,
        left_out=tuple(left_out),
        notes=(*notes, *notes_on(scoring, left_out, smallest_effect > 0), *_missing_notes(results)),
    )


def _decide(
    scores: Sequence[st.Scores], base: int, factors: Sequence[int], effect: float, num_unscored: int
) -> list[State]:
    """Return the State (sequential.py) of each arm, compared with the baseline, `scores[base]`.

    Without `effect` (the smallest effect), multiply p-values by `factors`, which correct for
    repeated looks, and adjust them for the number of arms (Holm). With `effect`, decide
    sequentially. The open arms share the error rate with `num_unscored` arms without scores.
    """
    if effect:
        return decide_arms(scores, base, effect, num_unscored)
    spreads = [st.spread_of(one, scores[base]) for one in scores]
    gains = [float(one.y.mean() - scores[base].y.mean()) for one in scores]
    p_values = [
        st.p_value(gain, spread) * factor
        for gain, spread, factor in zip(gains, spreads, factors, strict=True)
    ]
    p_values[base] = nan
    states = []
    for gain, spread, p in zip(gains, spreads, st.adjust_by_holm(p_values), strict=True):
        unknown = st.Interval(gain, nan, nan)
        states.append(State(unknown, 0.0, nan, st.decide(unknown, p), spread, p))
    return states


def _arm_results(
    scoring: Scoring, control: Arm, num_draws: int, smallest_effect: float, num_unscored: int
) -> list[ArmResult]:
    # Keep the order of the random draws, so that a report repeats its numbers exactly.
    rng, arms = np.random.default_rng(SEED), scoring.arms
    at = next(index for index, scored in enumerate(arms) if scored.arm is control)
    base = arms[at].scores
    questions = st.question_weights(base.strata, rng, num_draws)
    seeds = [st.seed_weights(one.scores.num_seeds, rng, num_draws) for one in arms]
    draws = [
        st.draw_scores(one.scores, weights, questions)
        for one, weights in zip(arms, seeds, strict=True)
    ]
    looks = [max(one.arm.num_looks, control.num_looks) for one in arms]
    factors = [st.looks_factor(number) for number in looks]
    rule = (at, factors, smallest_effect, num_unscored)
    states = _decide([one.scores for one in arms], *rule)
    others = [(name, _decide(one, *rule)) for name, one in assumptions(scoring)]
    results = []
    for index, (one, state) in enumerate(zip(arms, states, strict=True)):
        scores, difference, decision = one.scores, state.difference, state.decision
        can_decide = index != at and scores.resamples_seeds and base.resamples_seeds
        visible, needed, undecided_if = nan, None, ""
        if index == at:
            decision = st.BASELINE
        elif smallest_effect:
            visible, needed = difference.high - difference.value, state.seeds_needed
        else:
            assert state.spread is not None
            difference = st.interval(difference.value, draws[index] - draws[at], state.spread)
            decision = st.OPEN
            if can_decide:
                decision = st.decide(difference, state.p_value)
                num_others = len(arms) - 1
                visible = power.visible_difference(state.spread, num_others * factors[index])
                # More seeds mean one more look, which raises the factor of the p-value.
                factor = num_others * st.looks_factor(looks[index] + 1)
                needed = power.seeds_needed(difference.value, state.spread, factor)
        if decision in (st.BETTER, st.WORSE, st.EQUAL):
            failing = {name: s[index] for name, s in others if s[index].decision != decision}
            if undecided_if := next(iter(failing), ""):
                # `seeds_needed` is None if an assumption leads to another sequential decision. That
                # decision is final, so no number of seeds (inf) makes the decisions agree.
                longest = max(one.seeds_needed or inf for one in failing.values())
                decision, needed = st.OPEN, longest if smallest_effect else None
        several = len(np.unique(scores.strata)) > 1
        results.append(
            ArmResult(
                **vars(one),
                score=st.interval(float(scores.y.mean()), draws[index], st.spread_of(scores)),
                difference=difference,
                p_value=state.p_value,
                decision=decision + f" within {smallest_effect:g}" * (decision == st.EQUAL),
                undecided_if=undecided_if,
                chance_better=st.chance_better(scores.means, base.means) if can_decide else nan,
                visible_difference=visible,
                seeds_needed=needed,
                interquartile=st.interquartile_interval(scores, rng) if several else None,
            )
        )
    return results


def _baseline(arms: Sequence[Arm], wanted: str) -> Arm:
    with_finished = [arm for arm in arms if arm.finished]
    if not with_finished:
        runs = [run for arm in arms for run in arm.runs]
        raise NothingToCompare(
            f"none of {len(runs)} runs has finished ({runs[0].name}: {runs[0].cause}): finish one"
            if runs
            else "these folders contain no run: give the folder of a sweep or of runs (outputs/...)"
        )
    if not wanted:
        has_scores = [
            max((bool(run.evaluations), run.training_reward is not None) for run in arm.finished)
            for arm in with_finished
        ]
        return with_finished[has_scores.index(max(has_scores))]
    chosen = next((arm for arm in arms if wanted in (arm.label, arm.name)), None)
    if chosen is None:
        names = ", ".join(arm.label for arm in arms)
        raise NoBaseline(f"baseline={wanted} is not an arm: choose one of {names}")
    if not chosen.finished:
        raise NoBaseline(f"no run of baseline={wanted} has finished: choose another baseline")
    return chosen


def _missing_notes(results: Sequence[ArmResult]) -> list[str]:
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.undecided_if, []).append(result.arm.name)
    names.pop("")
    return [
        f"No decision about {', '.join(arms)}, because the result would change if {assumption}."
        for assumption, arms in names.items()
    ]
