"""The conclusion of a comparison in one or two sentences, and a description of its data."""

from collections import Counter
from collections.abc import Sequence
from math import inf

from lab.report.comparison import ArmResult, Comparison
from lab.report.power import MOST_SEEDS
from lab.report.scoring import TRAINING, as_range
from lab.report.statistics import BETTER, EQUAL, FEWEST_SEEDS, OPEN, WORSE

_MOST_CHARACTERS = 110  # three lines on a phone; longer sentences are replaced by counts


def conclusion(comparison: Comparison) -> str:
    return " ".join(text for text in (headline(comparison), ended_early(comparison)) if text)


def headline(comparison: Comparison) -> str:
    """Name the better, worse, equal and undecided arms, or count them if the text is too long."""
    baseline = comparison.baseline
    if not comparison.others:
        return f"{baseline.arm.name} scores {baseline.score:.3f}."
    groups: dict[str, list[ArmResult]] = {BETTER: [], WORSE: [], EQUAL: [], OPEN: []}
    for result in sorted(comparison.others, key=lambda result: -result.difference.value):
        groups[result.decision.partition(" within")[0]].append(result)
    (better, worse, equal, undecided), name, clauses = groups.values(), baseline.arm.name, []
    if better:
        clauses.append(f"{_join_names(better, margins=True)} beat{'s' * (len(better) == 1)} {name}")
    if worse:
        clauses.append(f"{_join_names(worse, margins=True)} {_is_or_are(worse)} worse than {name}")
    if equal:
        effect = f"within {comparison.smallest_effect:g}"
        clauses.append(f"{_join_names(equal)} {_is_or_are(equal)} equal to {name} {effect}")
    if undecided:
        names, yet = _join_names(undecided), " yet" if comparison.smallest_effect else ""
        has_seeds = any(result.visible_difference >= 0 for result in undecided)  # False for NaN
        unclear = f"{names} cannot be distinguished from {name}{yet}"
        clauses.append(unclear if has_seeds else f"no decision about {names}")
    text = f"{'; '.join(clauses)}."
    if len(text) <= _MOST_CHARACTERS:
        return text
    counts = [f"{len(group)} {decision}" for decision, group in groups.items() if group]
    if better:
        counts[0] += f" (best: {better[0].arm.name}, by {better[0].difference.value:.3f})"
    arms = "1 arm" if len(comparison.others) == 1 else f"{len(comparison.others)} arms"
    texts = [f"{arms} against {one}: {', '.join(counts)}." for one in (name, "the baseline")]
    return next((text for text in texts if len(text) <= _MOST_CHARACTERS), texts[-1])


def _is_or_are(results: Sequence[ArmResult]) -> str:
    return "is" if len(results) == 1 else "are"


def ended_early(comparison: Comparison) -> str:
    """Return a sentence on the runs that ended early and were not repeated, or ""."""
    early = [arm.name for arm in comparison.arms for _ in arm.ended_early]
    if not early:
        return ""
    name, number = Counter(early).most_common(1)[0]
    most = "" if number == len(early) else f"{number} of them "
    return f"Ended early: {len(early)} of {len(comparison.runs)} runs, {most}of {name}."


def basis(comparison: Comparison) -> str:
    """Return a sentence about the scores: what they measure, and from how many seeds and runs."""
    results, scoring = comparison.results, comparison.scoring
    seeds = as_range([result.scores.num_seeds for result in results])
    text = f"{seeds} seed{'s' * (seeds != '1')}{' each' * (len(results) > 1)}"
    num_runs = as_range([len(result.runs) for result in results])
    if num_runs != seeds:
        text += f" ({num_runs} runs)"
    if scoring.measure == TRAINING:
        return f"Scored by the training reward of {scoring.judged}, {text}."
    questions = f"question{'s' * (len(scoring.questions) != 1)}"
    return f"Scored on {len(scoring.questions)} held-out {questions}, {scoring.judged}, {text}."


def describe_power(comparison: Comparison) -> str:
    """Return sentences on the smallest visible difference (power.py) and on the seeds needed."""
    # Skip arms that are undecided only because of missing data. A note names these arms.
    unclear = [r for r in comparison.others if r.decision == OPEN and not r.undecided_if]
    known = [result for result in unclear if result.visible_difference >= 0]  # False for NaN
    texts = []
    if len(known) < len(unclear):
        texts.append(f"Decisions need at least {FEWEST_SEEDS} seeds of each arm.")
    if known:
        sizes = sorted({f"{result.visible_difference:.2g}" for result in known}, key=float)
        size = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        texts.append(f"The smallest visible difference is {size}.")
    needing = [result for result in known if result.seeds_needed is not None]
    if needing:
        result = min(needing, key=lambda result: result.seeds_needed or inf)
        number, effect = result.seeds_needed or inf, comparison.smallest_effect
        seeds = f"more than {MOST_SEEDS:,}" if number > MOST_SEEDS else f"about {number:.0f}"
        needs = "more questions, not more seeds" if number == inf else f"{seeds} seeds of each arm"
        observed = f"the observed {result.difference.value:+.3g}"
        observed = f"0 or {effect:g}" if abs(result.difference.value) < effect else observed
        texts.append(f"If {result.arm.name} truly differs by {observed}, a decision needs {needs}.")
    return " ".join(texts)


def _join_names(results: Sequence[ArmResult], *, margins: bool = False) -> str:
    names = [r.arm.name + f" (by {abs(r.difference):.3f})" * margins for r in results]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
