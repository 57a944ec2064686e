"""The conclusion of a comparison in one sentence."""

from collections.abc import Sequence

from lab.report.comparison import ArmResult, Comparison
from lab.report.scoring import TRAINING
from lab.report.statistics import BETTER, FEWEST_SEEDS, UNCLEAR, WORSE

_MAX_NAMES = 6  # longer lists of arms are replaced by their count


def conclusion(comparison: Comparison) -> str:
    """Return which arms are better or worse than the baseline, and which are indistinguishable."""
    baseline, basis = comparison.baseline, _basis(comparison)
    if not comparison.others:
        return f"{baseline.arm.name} scores {baseline.score:.3f} {basis}."
    better, worse, unclear = (
        sorted(
            (result for result in comparison.others if result.decision == decision),
            key=lambda result: -result.difference.value,
        )
        for decision in (BETTER, WORSE, UNCLEAR)
    )
    name, clauses = baseline.arm.name, []
    if better:
        clauses.append(f"{_with_differences(better)} beat{'s' * (len(better) == 1)} {name}")
    if worse:
        are = "is" if len(worse) == 1 else "are"
        clauses.append(f"{_with_differences(worse)} {are} worse than {name}")
    if unclear:
        clauses.append(_unclear_clause(unclear, baseline))
    # Add the basis (questions, seeds) to the first clause that contains numbers.
    at = 0 if better or worse else -1
    clauses[at] = f"{clauses[at]} {basis}"
    text = "; ".join(clauses)
    # Capitalise the words "the other", but not the name of an arm.
    return f"{'T' if text.startswith('the other') else text[0]}{text[1:]}."


def _with_differences(results: Sequence[ArmResult]) -> str:
    """Return the names of the arms with their differences to the baseline."""
    return _joined([f"{result.arm.name} (by {abs(result.difference):.3f})" for result in results])


def _unclear_clause(results: Sequence[ArmResult], baseline: ArmResult) -> str:
    names = [result.arm.name for result in results]
    shown = _joined(names) if len(names) <= _MAX_NAMES else f"the other {len(names)} arms"
    text = f"{shown} cannot be distinguished from {baseline.arm.name}"
    if not all(result.has_enough_seeds for result in [*results, baseline]):
        return f"{text} (use at least {FEWEST_SEEDS} seeds of each arm)"
    return f"{text} ({_needed_seeds(results, baseline)})"


def _needed_seeds(results: Sequence[ArmResult], baseline: ArmResult) -> str:
    """Return the smallest detectable difference, and the number of additional seeds needed."""
    visible = max(result.visible_difference for result in results)
    smallest = f"smallest visible difference {visible:.2g}"
    fewest = min(result.scores.num_seeds for result in [*results, baseline])
    needed = [
        # Recommend at least one more seed, because the present seeds allow no decision.
        (max(result.seeds_needed - fewest, 1), result.arm.name)
        for result in results
        if result.seeds_needed is not None
    ]
    if not needed:
        return f"{smallest}; such small differences require more questions, not more seeds"
    number, name = min(needed)
    each = "" if len(results) == 1 else f" each would suffice for {name}"
    return f"{smallest}; {number} more seed{'s' * (number > 1)}{each or ' would suffice'}"


def _basis(comparison: Comparison) -> str:
    """Return the basis of the comparison: the measure and the number of seeds."""
    counts = sorted({result.scores.num_seeds for result in comparison.results})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"{number} seed{'s' * (number != '1')}"
    if len(comparison.results) > 1:
        seeds += " each"
    if comparison.scoring.measure == TRAINING:
        return f"by the training reward of {comparison.scoring.judged}, {seeds}"
    return f"on {len(comparison.scoring.questions)} held-out questions, {seeds}"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
