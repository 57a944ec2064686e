"""Compare arms on the same questions: scores, differences to the baseline, decisions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from lab.report import statistics as st
from lab.report.arms import Arm, code_note
from lab.report.run import Run
from lab.report.scoring import TRAINING, ScoredArm, Scoring, score_arms

SEED = 0  # seed of the bootstrap, so that equal runs give equal pages
_MAX_CAUSES = 3  # maximum number of causes in the note about excluded runs


class NothingToCompare(ValueError):
    """The error if no run can be compared. Its message is for the user."""


class NoBaseline(ValueError):
    """The error if the named arm cannot be the baseline. Its message is for the user."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArmResult(ScoredArm):
    """The results of one arm. Intervals cover statistics.LEVEL, and NaN marks unknown numbers."""

    score: st.Interval
    difference: st.Interval  # difference to the baseline's score
    p_value: float  # p-value of the difference, adjusted for the number of arms
    decision: str  # BETTER, WORSE, UNCLEAR or BASELINE
    chance_better: float
    visible_difference: float
    seeds_needed: int | None  # per arm, None if unknown or if no number suffices
    interquartile: st.Interval | None  # None with a single environment

    @property
    def minutes(self) -> float:
        """The mean duration of a run in minutes."""
        return float(np.mean([run.seconds for run in self.runs])) / 60

    @property
    def reward(self) -> float:
        """The mean score without its interval."""
        return self.score.value

    @property
    def scored_seeds(self) -> int:
        """The number of scored runs, one per seed."""
        return self.scores.num_seeds

    @property
    def has_enough_seeds(self) -> bool:
        """Whether the arm has enough seeds to estimate the variance between seeds."""
        return self.scores.resamples_seeds


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """The comparison of all arms with the baseline."""

    question: str  # the sweep's question, "" if it has none
    arms: tuple[Arm, ...]  # all arms, including arms without a scored run
    scoring: Scoring
    results: tuple[ArmResult, ...]
    baseline: ArmResult
    left_out: tuple[tuple[Run, str], ...]  # excluded runs and the reasons
    notes: tuple[str, ...]  # warnings for the reader

    @property
    def runs(self) -> list[Run]:
        """All runs, including excluded runs."""
        return [run for arm in self.arms for run in arm.runs]

    @property
    def others(self) -> list[ArmResult]:
        """The results of all arms except the baseline."""
        return [result for result in self.results if result is not self.baseline]

    @property
    def by_score(self) -> list[ArmResult]:
        """The results of all arms, best arm first."""
        return sorted(self.results, key=lambda result: -result.score.value)

    @property
    def has_intervals(self) -> bool:
        """Whether the interval of any score or difference is known."""
        return any(isfinite(r.score.low) or isfinite(r.difference.low) for r in self.results)


def compare(
    arms: Sequence[Arm],
    *,
    baseline: str = "",
    question: str = "",
    num_judged: int = 1,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare arms by their scores on the same questions, else by their training reward.

    `baseline` is the name or the label of an arm. By default it is the first arm with evaluations,
    or else with rewards. The last `num_judged` evaluations of each run are averaged.

    Raises:
        NothingToCompare: no run has finished, or the baseline has no score.
        NoBaseline: no arm has this name, or no run of that arm has finished.
    """
    control = _baseline(arms, baseline)
    scoring = score_arms(arms, control, num_judged)
    if not any(scored.arm is control for scored in scoring.arms):
        raise NothingToCompare(
            f"{control.name} has neither an evaluation nor a training reward: choose another "
            "baseline, or run with evaluation=default"
        )
    results = _results(scoring, control)
    left_out = [(run, run.cause) for arm in arms for run in arm.runs if not run.finished]
    left_out += scoring.left_out
    return Comparison(
        question=question,
        arms=tuple(arms),
        scoring=scoring,
        results=tuple(results),
        baseline=next(result for result in results if result.arm is control),
        left_out=tuple(left_out),
        notes=(*notes, *_notes(results, left_out, scoring)),
    )


def _results(scoring: Scoring, control: Arm) -> list[ArmResult]:
    # Do not change the order of the random draws, because it determines the exact numbers.
    rng, arms = np.random.default_rng(SEED), scoring.arms
    at = next(index for index, scored in enumerate(arms) if scored.arm is control)
    base = arms[at].scores
    questions = st.question_weights(base.strata, rng)
    draws = [
        st.draw_scores(one.scores, st.seed_weights(one.scores.num_seeds, rng), questions)
        for one in arms
    ]
    spreads = [st.spread_of(one.scores, base) for one in arms]
    gains = [float(one.scores.y.mean() - base.y.mean()) for one in arms]
    others = [index for index in range(len(arms)) if index != at]
    adjusted = st.holm_adjusted([st.p_value(gains[index], spreads[index]) for index in others])
    p_values = {at: nan} | dict(zip(others, adjusted, strict=True))
    results = []
    for index, (one, spread, gain) in enumerate(zip(arms, spreads, gains, strict=True)):
        scores, is_other = one.scores, index != at
        knows = is_other and scores.resamples_seeds and base.resamples_seeds
        difference, decision = st.Interval(0.0, nan, nan), st.BASELINE
        if is_other:
            difference = st.interval(gain, draws[index] - draws[at], spread)
            decision = st.decide(difference, p_values[index], has_enough_seeds=knows)
        several = len(np.unique(scores.strata)) > 1
        results.append(
            ArmResult(
                **vars(one),
                score=st.interval(float(scores.y.mean()), draws[index], st.spread_of(scores)),
                difference=difference,
                p_value=p_values[index],
                decision=decision,
                chance_better=st.chance_better(scores.runs, base.runs) if knows else nan,
                visible_difference=st.visible_difference(spread, len(others)) if knows else nan,
                seeds_needed=st.seeds_needed(gain, spread, len(others)) if knows else None,
                interquartile=st.interquartile_interval(scores, rng) if several else None,
            )
        )
    return results


def _baseline(arms: Sequence[Arm], wanted: str) -> Arm:
    """Return the arm with which the other arms are compared."""
    counting = [arm for arm in arms if arm.finished]
    if not counting:
        raise NothingToCompare(_why_not_comparable(arms))
    if not wanted:
        # Prefer the first arm with evaluations, else the first arm with training rewards.
        return max(counting, key=lambda arm: max(_measures(run) for run in arm.finished))
    chosen = next((arm for arm in arms if wanted in (arm.label, arm.name)), None)
    if chosen is None:
        names = ", ".join(arm.label for arm in arms)
        raise NoBaseline(f"no arm is called {wanted}: baseline= is one of {names}")
    if not chosen.finished:
        raise NoBaseline(f"no run of the baseline {wanted} has finished: choose another")
    return chosen


def _measures(run: Run) -> tuple[bool, bool]:
    """Return whether the run has evaluations, and whether it has training rewards."""
    return bool(run.evaluations), run.training_reward is not None


def _why_not_comparable(arms: Sequence[Arm]) -> str:
    runs = [run for arm in arms for run in arm.runs]
    if not runs:
        return "there is no run here: name the folder of a sweep or of runs (outputs/...)"
    return f"none of {len(runs)} runs has finished; the first: {runs[0].name}: {runs[0].cause}"


def _notes(
    results: Sequence[ArmResult], left_out: Sequence[tuple[Run, str]], scoring: Scoring
) -> list[str]:
    """Return warnings that limit the conclusions, such as too few seeds."""
    notes, runs = [], scoring.runs
    scores = np.unique(np.concatenate([result.scores.y.ravel() for result in results]))
    if len(scores) == 1:
        notes.append(
            f"Every score of every run is {scores[0]:g}: the policy cannot learn from equal "
            "rewards. Look at some rollouts (python view.py <a run>), then make the task easier or "
            "harder."
        )
    if scoring.measure == TRAINING:
        notes.append(
            "Compared by training reward, which every run measured on different examples. Use "
            "evaluation=default to compare all runs on the same questions."
        )
    if few := [result.arm.name for result in results if not result.has_enough_seeds]:
        names = "every arm" if len(few) == len(results) > 1 else ", ".join(few)
        notes.append(
            f"Fewer than {st.FEWEST_SEEDS} seeds of {names}: their intervals lack the variance "
            "between seeds, so no such arm is called better or worse."
        )
    most, compared = max(len(run.questions) for run in runs), len(scoring.questions)
    if 0 < compared < most:
        notes.append(
            f"Compared on the {compared} questions that have a score in every run, "
            f"of up to {most} questions."
        )
    if " to " in scoring.judged:
        notes.append(f"Not all runs are judged at the same step: {scoring.judged}.")
    notes += filter(None, (code_note(result.arm) for result in results))
    if left_out:
        notes.append(_exclusion_note(left_out))
    if broken := sum(one.num_broken for run in runs for one in run.evaluations.values()):
        notes.append(f"{broken} lines of evaluations cannot be read and are left out.")
    return notes


def by_cause(left_out: Sequence[tuple[Run, str]]) -> list[tuple[str, list[Run]]]:
    """Return the excluded runs by cause, the most frequent cause first."""
    causes: dict[str, list[Run]] = defaultdict(list)
    for run, why in left_out:
        causes[why].append(run)
    return sorted(causes.items(), key=lambda item: -len(item[1]))


def _exclusion_note(left_out: Sequence[tuple[Run, str]]) -> str:
    """Return a note with the most frequent causes of exclusion, and one run for each cause."""
    shown = [
        f"{runs[0].name}{f' and {len(runs) - 1} more' * (len(runs) > 1)}: {why}"
        for why, runs in by_cause(left_out)[:_MAX_CAUSES]
    ]
    return f"Excluded runs ({len(left_out)}): {'; '.join(shown)}"
