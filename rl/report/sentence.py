"""What a comparison says, in one sentence that holds no more than the numbers do."""

from collections.abc import Sequence
from math import isnan

from rl.report.comparison import ArmResult, Comparison
from rl.report.judging import TRAINING
from rl.report.statistics import BETTER, FEWEST_SEEDS, UNCLEAR, WORSE, Interval

_MOST_NAMES = 6  # that are listed one by one


def sentence(comparison: Comparison) -> str:
    """The conclusion: which arms are better or worse, by how much, and what cannot be told."""
    baseline = comparison.baseline
    if not comparison.others:
        return f"{baseline.arm.name} scores {_interval(baseline.score)} {_basis(comparison)}."
    verdicts = {
        verdict: sorted(
            (result for result in comparison.others if result.verdict == verdict),
            key=lambda result: -result.difference.value,
        )
        for verdict in (BETTER, WORSE, UNCLEAR)
    }
    name, parts = baseline.arm.name, []
    if better := verdicts[BETTER]:
        parts.append(f"{_each(better)} beat{'s' * (len(better) == 1)} {name}")
    if worse := verdicts[WORSE]:
        parts.append(f"{_each(worse)} {_are(worse)} worse than {name}")
    if unclear := verdicts[UNCLEAR]:
        parts.append(_unclear(unclear, baseline))
    if better or worse:
        parts[0] = f"{parts[0]} {_basis(comparison)}"
    else:
        parts[-1] = f"{parts[-1]} {_basis(comparison)}"
    text = "; ".join(parts)
    # The name of an arm stays as it is written.
    return f"{'T' if text.startswith('the other') else text[0]}{text[1:]}."


def _each(results: Sequence[ArmResult]) -> str:
    """Names with their differences."""
    return _joined([f"{r.arm.name} (by {_interval(r.difference, absolute=True)})" for r in results])


def _unclear(results: Sequence[ArmResult], baseline: ArmResult) -> str:
    names = [result.arm.name for result in results]
    shown = _joined(names) if len(names) <= _MOST_NAMES else f"the other {len(names)} arms"
    text = f"{shown} cannot be told from {baseline.arm.name}"
    if not all(result.knows_seeds for result in [*results, baseline]):
        return f"{text} (it takes {FEWEST_SEEDS} seeds of each arm to know how much seeds differ)"
    return f"{text} ({_what_it_takes(results, baseline)})"


def _what_it_takes(results: Sequence[ArmResult], baseline: ArmResult) -> str:
    """How large a difference would have been seen, and how many seeds show what there is."""
    visible = max(result.visible_difference for result in results)
    smallest = f"smallest visible difference {visible:.2g}"
    fewest = min(result.scores.num_seeds for result in [*results, baseline])
    needed = [
        # Those that there are would have done, had chance been kinder: then one more.
        (max(r.seeds_needed - fewest, 1), r.arm.name)
        for r in results
        if r.seeds_needed is not None
    ]
    if not needed:
        return f"{smallest}; for differences this small it takes more questions, not seeds"
    (least, nearest), (most, furthest) = min(needed), max(needed)
    if len(results) == 1:
        return f"{smallest}; {_seeds(least)} would do"
    if least == most:
        return f"{smallest}; {_seeds(least)} each would do for {nearest}"
    return f"{smallest}; {_seeds(least)} each would do for {nearest}, {most} for {furthest}"


def _seeds(number: int) -> str:
    return f"{number} more seed{'s' * (number > 1)}"


def _basis(comparison: Comparison) -> str:
    """What the numbers are of."""
    counts = sorted({result.scores.num_seeds for result in comparison.results})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"{number} seed{'s' * (number != '1')}"
    if len(comparison.results) > 1:
        seeds += " each"
    if comparison.measure == TRAINING:
        return f"by the training reward of {comparison.judged}, {seeds}"
    return f"on {len(comparison.questions)} held-out questions, {seeds}"


def _interval(interval: Interval, *, absolute: bool = False) -> str:
    value, low, high = interval.value, interval.low, interval.high
    if absolute and value < 0:
        value, low, high = -value, -high, -low
    if isnan(low):
        return f"{value:.3f}"
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _are(results: Sequence[ArmResult]) -> str:
    return "is" if len(results) == 1 else "are"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
