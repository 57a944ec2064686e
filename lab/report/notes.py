"""The notes of a report, which say what limits its conclusions."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from lab.report import statistics as st
from lab.report.run import Run
from lab.report.scoring import TRAINING, Scoring, as_range, judged_step
from rl.runtime.start_record import program

_MAX_CAUSES = 3  # maximum number of causes in the note about excluded runs


def notes_on(
    scoring: Scoring, left_out: Sequence[tuple[Run, str]], is_sequential: bool
) -> Iterator[str]:
    yield from _notes_on_scores(scoring)
    yield from _notes_on_seeds(scoring, is_sequential)
    runs = scoring.runs
    yield from _notes_on_code(scoring)
    unscored = [one for one in scoring.arms if one.num_unscored]
    if counts := [f"{a.arm.name} {a.num_unscored} of {a.num_rollouts}" for a in unscored]:
        yield f"Evaluation rollouts without a score are left out: {', '.join(counts)}."
    if (waiting := sum(run.is_open for run, _ in left_out)) and not is_sequential:
        yield f"Runs that have not ended: {waiting}. The p-values are valid only if all have ended."
    if left_out:
        shown = [
            f"{runs[0].name}{f' and {len(runs) - 1} more' * (len(runs) > 1)}: {why}"
            for why, runs in group_by_cause(left_out)[:_MAX_CAUSES]
        ]
        yield f"Excluded runs ({len(left_out)}): {'; '.join(shown)}"
    if broken := sum(one.num_broken for run in runs for one in run.evaluations.values()):
        yield f"Number of unreadable lines in evaluations/*.jsonl, which are left out: {broken}."


def _notes_on_scores(scoring: Scoring) -> Iterator[str]:
    runs = scoring.runs
    scores = np.concatenate([one.scores.y.ravel() for one in scoring.arms])
    if len(scores) > 1 and np.ptp(scores) == 0:
        yield (
            f"Every score of every run is {scores[0]:g}. The policy cannot learn if the rewards of "
            f"each group are equal: look at some rollouts ({program('view')} <a run>), then "
            "make the task easier or harder. The mean of a zero-sum game of roles is always 0."
        )
    if scoring.measure == TRAINING:
        text = "Compared by training reward (each run measures it on its own examples)"
        if scoring.why_training:
            yield f"{text}, because {scoring.why_training}."
        else:
            yield f"{text}. Use evaluation=default to compare all runs on the same questions."
        means = [(a.arm.name, np.mean([r.unscored_share for r in a.runs])) for a in scoring.arms]
        if shares := [f"{name} {100 * share:.1f} %" for name, share in means if share]:
            yield (
                f"Training rollouts without a score: {', '.join(shares)}. They are left out, and "
                "the report does not check whether rewards for them could change a decision."
            )
        if any(run.selects_examples for run in runs):
            yield (
                "The order, the buffer or the strategy chose examples or rollouts by rewards, so "
                "training rewards of different policies or strategies are not comparable."
            )
    most, compared = max(len(run.questions) for run in runs), len(scoring.questions)
    if 0 < compared < most:
        yield (
            f"The runs have up to {most} questions. Only the {compared} questions with a score in "
            "every run are compared."
        )
    steps = [[judged_step(run, scoring.measure) for run in one.runs] for one in scoring.arms]
    if len({step for of_arm in steps for step in of_arm}) > 1:
        names = [one.arm.name for one in scoring.arms]
        texts = [f"{name} at {as_range(own)}" for name, own in zip(names, steps, strict=True)]
        name = "step" if scoring.measure == TRAINING else "policy version"
        yield f"The runs are scored at different {name}s, so compare with care: {', '.join(texts)}."


def _notes_on_seeds(scoring: Scoring, is_sequential: bool) -> Iterator[str]:
    arms = scoring.arms
    if few := [one.arm.name for one in arms if not one.scores.resamples_seeds]:
        names = "every arm" if len(few) == len(arms) > 1 else ", ".join(few)
        yield (
            f"Fewer than {st.FEWEST_SEEDS} seeds of {names}: the intervals lack the variance "
            "between seeds, so such an arm is never called better or worse. Run more seeds."
        )
    looks = max(one.arm.num_looks for one in arms)
    if looks > 1 and not is_sequential:
        times = "once" if looks == 2 else f"{looks - 1} times"
        yield (
            f"Runs were added {times} after the sweep had begun. Growing a sweep until "
            "it shows a difference causes false decisions, so p-values are multiplied by up to "
            f"{st.looks_factor(looks)}."
        )


def _notes_on_code(scoring: Scoring) -> Iterator[str]:
    if parents := sorted({run.started_from for run in scoring.runs} - {""}):
        yield f"Initial weights from other runs: {'; '.join(parents)}."
    commits = sorted({run.commit for run in scoring.runs} - {""})
    if len(commits) > 1:
        texts = [f"{commit[:7]}{commit[40:]}" for commit in commits]  # keep the suffix +uncommitted
        yield f"The runs used {len(commits)} commits: {', '.join(texts)}."
    files = []
    for name in sorted({name for run in scoring.runs for name in run.code}):
        used = {run.code[name] for run in scoring.runs if name in run.code}
        in_arms = [{run.code.get(name) for run in one.runs} for one in scoring.arms]
        if len(used) > 1 or len(min(used)) > 1 or any(len(in_arm) > 1 for in_arm in in_arms):
            files.append(name)
    if files:
        yield (
            f"The runs used different versions of {', '.join(files)}, or some runs of an arm did "
            "not use it: compare the copies in code/ of their folders."
        )


def group_by_cause(left_out: Sequence[tuple[Run, str]]) -> list[tuple[str, list[Run]]]:
    causes: dict[str, list[Run]] = defaultdict(list)
    for run, why in left_out:
        causes[why].append(run)
    return sorted(causes.items(), key=lambda item: -len(item[1]))
