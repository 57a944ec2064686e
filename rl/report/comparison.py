"""Arms compared on what all of them were asked: scores, differences to the baseline, verdicts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

import numpy as np

from rl.report import statistics as st
from rl.report.arms import Arm
from rl.report.curve import Efficiency, efficiency, final_score
from rl.report.evaluations import Question
from rl.report.evidence import RUNNING, Evidence
from rl.report.judging import TRAINING, Judgement, curve_of, judge, questions_of

SEED = 0  # of the draws: the same runs give the same page
_CAUSES = 3  # that a terminal names of runs that do not count


class NothingToCompare(ValueError):
    """Not a single run that counts; the message is for the user."""


class NoBaseline(NothingToCompare):
    """The arm that was named cannot be the baseline; another can."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArmResult:
    """One arm in numbers. Intervals are at statistics.LEVEL; NaN where nothing is known."""

    arm: Arm
    runs: tuple[Evidence, ...]  # that are judged, one a line of `scores`
    scores: st.Scores
    score: st.Interval
    difference: st.Interval  # to the baseline
    p_value: float  # of the difference, adjusted for the number of arms
    verdict: str  # "" of the baseline
    chance_better: float
    visible_difference: float
    seeds_needed: int | None  # of each arm; None: unknown, or no number would do
    interquartile: st.Interval | None  # over several environments
    efficiency: Efficiency
    area: float  # mean height of the curves

    @property
    def minutes(self) -> float:
        """Of a run, on average."""
        return float(np.mean([run.seconds for run in self.runs])) / 60

    @property
    def knows_seeds(self) -> bool:
        """Whether there are enough seeds for the interval to know how they differ."""
        return self.scores.resamples_seeds


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """All arms of which at least one run counts, the baseline among them."""

    question: str  # that the sweep asks, "" where nobody wrote it down
    measure: str  # HELD_OUT or TRAINING
    judged: str  # which policy version or steps
    results: tuple[ArmResult, ...]
    baseline: ArmResult
    questions: tuple[Question, ...]  # that are compared; none for training rewards
    arms: tuple[Arm, ...]  # those of which nothing counts, too
    left_out: tuple[tuple[Evidence, str], ...]  # runs, and why
    notes: tuple[str, ...] = field(default=())  # what a reader must know

    @property
    def runs(self) -> list[Evidence]:
        """Every run, whether it counts or not."""
        return [run for arm in self.arms for run in arm.runs]

    @property
    def others(self) -> list[ArmResult]:
        """All arms but the baseline."""
        return [result for result in self.results if result is not self.baseline]

    @property
    def by_score(self) -> list[ArmResult]:
        """The best arm first."""
        return sorted(self.results, key=lambda result: -result.score.value)

    @property
    def has_intervals(self) -> bool:
        """Whether anything is known of how far the numbers may be off."""
        return any(isfinite(r.score.low) or isfinite(r.difference.low) for r in self.results)

    @property
    def most_steps(self) -> int:
        """Of any run."""
        return max(run.num_steps for run in self.runs)


def compare(
    arms: Sequence[Arm],
    *,
    baseline: str | None = None,
    question: str = "",
    num_judged: int = 1,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare arms by what all were asked, else by their training reward.

    Args:
        arms: in the order in which they were run.
        baseline: the name or label of one; None: the first of which a run counts.
        question: that the sweep asks.
        num_judged: evaluations at the end of a run that are averaged.
        notes: what a reader must know beforehand.

    Raises:
        NothingToCompare: no run counts, or the baseline has no score.
        NoBaseline: no arm is called like it, or no run of that arm has finished.

    """
    control = _baseline(arms, baseline)
    judgement = judge(arms, control, num_judged)
    if not any(judged.arm is control for judged in judgement.arms):
        raise NothingToCompare(
            f"{control.name} has neither an evaluation nor a training reward: choose another "
            "baseline, or run with evaluation=default"
        )
    results = _results(judgement, control)
    left_out = [(run, run.cause) for arm in arms for run in arm.runs if not run.finished]
    left_out += judgement.left_out
    return Comparison(
        question=question,
        measure=judgement.measure,
        judged=judgement.judged,
        results=tuple(results),
        baseline=next(result for result in results if result.arm is control),
        questions=judgement.questions,
        arms=tuple(arms),
        left_out=tuple(left_out),
        notes=(*notes, *_notes(results, left_out, judgement)),
    )


def _results(judgement: Judgement, control: Arm) -> list[ArmResult]:
    rng, arms = np.random.default_rng(SEED), judgement.arms
    place = next(index for index, judged in enumerate(arms) if judged.arm is control)
    base = arms[place]
    questions = st.question_weights(base.scores.strata, rng)
    draws = [
        st.draw_scores(one.scores, st.seed_weights(one.scores.num_seeds, rng), questions)
        for one in arms
    ]
    spreads = [st.spread_of(one.scores, base.scores) for one in arms]
    gains = [float(one.scores.y.mean() - base.scores.y.mean()) for one in arms]
    others = [index for index in range(len(arms)) if index != place]
    adjusted = st.holm([st.p_value(gains[index], spreads[index]) for index in others])
    p_values = {place: nan} | dict(zip(others, adjusted, strict=True))
    curves = [[curve_of(run, judgement.measure) for run in one.runs] for one in arms]
    target = final_score(curves[place])
    results = []
    for index, (one, spread, gain) in enumerate(zip(arms, spreads, gains, strict=True)):
        scores, is_other = one.scores, index != place
        knows = is_other and scores.resamples_seeds and base.scores.resamples_seeds
        difference = st.Interval(0.0, nan, nan)
        if is_other:
            difference = st.interval(gain, draws[index] - draws[place], spread)
        verdict = st.verdict(difference, p_values[index], knows_seeds=knows)
        several = len(np.unique(scores.strata)) > 1
        results.append(
            ArmResult(
                arm=one.arm,
                runs=one.runs,
                scores=scores,
                score=st.interval(float(scores.y.mean()), draws[index], st.spread_of(scores)),
                difference=difference,
                p_value=p_values[index],
                verdict=verdict if is_other else "",
                chance_better=st.chance_better(scores.runs, base.scores.runs) if knows else nan,
                visible_difference=st.visible_difference(spread, len(others)) if knows else nan,
                seeds_needed=st.seeds_needed(gain, spread, len(others)) if knows else None,
                interquartile=st.interquartile_interval(scores, rng) if several else None,
                efficiency=efficiency(curves[index], target),
                area=float(np.mean([curve.mean_height for curve in curves[index]])),
            )
        )
    return results


def _baseline(arms: Sequence[Arm], wanted: str | None) -> Arm:
    """The arm that the others are compared with."""
    counting = [arm for arm in arms if arm.finished]
    if not counting:
        raise NothingToCompare(_why_nothing(arms))
    if wanted is None:
        evaluated = [arm for arm in counting if any(run.evaluations for run in arm.finished)]
        rewarded = [
            arm for arm in counting if any(r.training_reward is not None for r in arm.finished)
        ]
        return (evaluated or rewarded or counting)[0]
    chosen = next((arm for arm in arms if wanted in (arm.label, arm.name)), None)
    if chosen is None:
        names = ", ".join(arm.label for arm in arms)
        raise NoBaseline(f"no arm is called {wanted}: baseline= is one of {names}")
    if not chosen.finished:
        raise NoBaseline(f"no run of the baseline {wanted} has finished: choose another")
    return chosen


def _why_nothing(arms: Sequence[Arm]) -> str:
    runs = [run for arm in arms for run in arm.runs]
    if not runs:
        return "there is no run here: name the folder of a sweep or of runs (outputs/...)"
    going = sum(run.status == RUNNING for run in runs)
    if going:
        return f"none of {len(runs)} runs has finished, {going} of them are still going"
    return f"none of {len(runs)} runs has finished; the first: {runs[0].name}: {runs[0].cause}"


def _notes(
    results: Sequence[ArmResult],
    left_out: Sequence[tuple[Evidence, str]],
    judgement: Judgement,
) -> list[str]:
    """What the runs themselves say against reading too much into them."""
    notes, runs = [], judgement.runs
    scores = np.unique(np.concatenate([result.scores.y.ravel() for result in results]))
    if len(scores) == 1:
        notes.append(
            f"Every score of every run is {scores[0]:g}: there was nothing to learn from, or to "
            "tell arms apart by. Look at some rollouts (python view.py <a run>), then make the "
            "task easier or harder."
        )
    if judgement.measure == TRAINING:
        notes.append(
            "Training reward: other examples in every run, so chance differs more between them. "
            "evaluation=default asks all runs the same questions."
        )
    if few := [result.arm.name for result in results if not result.knows_seeds]:
        names = "every arm" if len(few) == len(results) > 1 else ", ".join(few)
        notes.append(
            f"Fewer than {st.FEWEST_SEEDS} seeds of {names}: no interval of theirs knows "
            "how much seeds differ, so there is no verdict on them."
        )
    asked, compared = max(len(questions_of(run)) for run in runs), len(judgement.questions)
    if 0 < compared < asked:
        notes.append(
            f"Compared on the {compared} questions that every run was asked and that could be "
            f"scored in every run, of up to {asked}."
        )
    if " to " in judgement.judged:
        notes.append(f"Not all runs are judged at the same step: {judgement.judged}.")
    if left_out:
        notes.append(_not_counting(left_out))
    broken = sum(run.num_broken for run in runs)
    broken += sum(evaluation.num_broken for run in runs for evaluation in run.evaluations.values())
    if broken:
        notes.append(f"{broken} lines of metrics or evaluations cannot be read and are left out.")
    return notes


def by_cause(left_out: Sequence[tuple[Evidence, str]]) -> list[tuple[str, list[Evidence]]]:
    """Runs that do not count by why, the commonest first."""
    causes: dict[str, list[Evidence]] = defaultdict(list)
    for run, why in left_out:
        causes[why].append(run)
    return sorted(causes.items(), key=lambda item: -len(item[1]))


def _not_counting(left_out: Sequence[tuple[Evidence, str]]) -> str:
    """How many runs, and the commonest causes, each with a run that it names."""
    runs_do = "run does" if len(left_out) == 1 else "runs do"
    causes = by_cause(left_out)
    said = [
        f"{runs[0].name}{f' and {len(runs) - 1} more' if len(runs) > 1 else ''}: {why}"
        for why, runs in causes[:_CAUSES]
    ]
    others = sum(len(runs) for _, runs in causes[_CAUSES:])
    said += [f"{others} for other reasons, which the page names"] if others else []
    return f"{len(left_out)} {runs_do} not count: {'; '.join(said)}"
