"""The conclusion of a comparison in one or two sentences, and what its numbers rest on."""

from collections.abc import Sequence
from math import inf

from lab.report.comparison import ArmResult, Comparison
from lab.report.power import MOST_SEEDS
from lab.report.scoring import TRAINING, as_range
from lab.report.statistics import BETTER, EQUAL, FEWEST_SEEDS, OPEN, UNCLEAR, WORSE

_MOST_CHARACTERS = 110  # three lines on a phone; longer sentences are replaced by counts


def conclusion(comparison: Comparison) -> str:
    """Return which arms are better or worse than the baseline, and how many runs ended early."""
    return " ".join(text for text in (headline(comparison), ended_early(comparison)) if text)


def headline(comparison: Comparison) -> str:
    """Return which arms are better, worse, equal or unclear, or only how many there are."""
    baseline = comparison.baseline
    if not comparison.others:
        return f"{baseline.arm.name} scores {baseline.score:.3f}."
    groups = [
        sorted(
            (result for result in comparison.others if result.decision.startswith(decisions)),
            key=lambda result: -result.difference.value,
        )
        for decisions in (BETTER, WORSE, EQUAL, (UNCLEAR, OPEN))
    ]
    (better, worse, equal, unclear), name, clauses = groups, baseline.arm.name, []
    distinguished = " yet" if comparison.smallest_effect else ""
    if better:
        clauses.append(f"{_with_differences(better)} beat{'s' * (len(better) == 1)} {name}")
    if worse:
        clauses.append(f"{_with_differences(worse)} {_are(len(worse))} worse than {name}")
    if equal:
        effect = f"within {comparison.smallest_effect:g}"
        names = _joined([result.arm.name for result in equal])
        clauses.append(f"{names} {_are(len(equal))} equal to {name} {effect}")
    if unclear:
        names = _joined([result.arm.name for result in unclear])
        clauses.append(f"{names} cannot be distinguished from {name}{distinguished}")
    texts = [f"{'; '.join(clauses)}."]
    texts += [_counts(groups, name) for name in (name, "the baseline")]
    return next((text for text in texts if len(text) <= _MOST_CHARACTERS), texts[-1])


def _counts(groups: Sequence[Sequence[ArmResult]], name: str) -> str:
    """Return how many arms are better, worse, equal and unclear, and the best of them."""
    words: list[str] = [BETTER, WORSE, EQUAL, "unclear"]
    numbers = {word: len(group) for word, group in zip(words, groups, strict=True)}
    total, better = sum(numbers.values()), numbers[BETTER]
    if total == numbers["unclear"]:
        arms = "The other arm cannot" if total == 1 else f"None of {total} arms can"
        return f"{arms} be distinguished from {name}."
    kind = next(word for word, number in numbers.items() if number)
    than = {WORSE: f"worse than {name}", EQUAL: f"equal to {name}"}.get(kind)
    text = f"{numbers[kind]} of {total} arms {_are(numbers[kind])} {than}"
    if better:
        best = groups[0][0]
        gain = best.difference.value
        text = f"{better} of {total} arms beat {name}, best {best.arm.name} (by {gain:.3f})"
    rest = [f"{n} {_are(n)} {word}" for word, n in numbers.items() if n and word != kind]
    return f"{'; '.join([text, ', '.join(rest)] if rest else [text])}."


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def ended_early(comparison: Comparison) -> str:
    """Return how many runs of each arm ended early and were not repeated, "" if there are none."""
    early = [(arm.name, len(arm.ended_early), len(arm.runs)) for arm in comparison.arms]
    early = sorted((one for one in early if one[1]), key=lambda one: -one[1])
    if not early:
        return ""
    texts = [f"{name} {number} of {total} runs" for name, number, total in early]
    text = f"Ended early: {', '.join(texts)}."
    if len(text) <= _MOST_CHARACTERS:
        return text
    number = sum(number for _, number, _ in early)
    return f"Ended early: {number} runs of {len(early)} arms, most of {texts[0]}."


def basis(comparison: Comparison) -> str:
    """Return what the scores are, and the numbers of seeds and of runs."""
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


def what_is_visible(comparison: Comparison) -> str:
    """Return the smallest visible difference, and the seeds that the observed one needs."""
    # More seeds do not decide an arm that is undecided because of missing data.
    unclear = [r for r in comparison.others if r.decision in (UNCLEAR, OPEN) and not r.undecided_if]
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
        texts.append(_needed(needing, comparison.smallest_effect))
    return " ".join(texts)


def _needed(results: Sequence[ArmResult], effect: float) -> str:
    """Return how many seeds decide about the arm that needs the fewest."""
    result = min(results, key=lambda result: result.seeds_needed or inf)
    number, observed = result.seeds_needed or inf, f"the observed {result.difference.value:+.3g}"
    seeds = f"more than {MOST_SEEDS:,}" if number > MOST_SEEDS else f"about {number:.0f}"
    needs = "more questions, not more seeds" if number == inf else f"{seeds} seeds of each arm"
    observed = f"0 or {effect:g}" if abs(result.difference.value) < effect else observed
    return f"If {result.arm.name} truly differs by {observed}, that needs {needs}."


def _with_differences(results: Sequence[ArmResult]) -> str:
    """Return the names of the arms with their differences to the baseline."""
    return _joined([f"{result.arm.name} (by {abs(result.difference):.3f})" for result in results])


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
