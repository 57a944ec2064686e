"""What runs say, for a person: the sentence and the table on the terminal, the page on disk.

report.json                             all numbers, first
report.html  report.csv  figures/       the page (rl/report/page.py); the rest stands without
summary.md  summary.json                of a sweep: the table, with the folders of its runs
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl.report.arms import Arm, arms_of
from rl.report.comparison import Comparison, NoBaseline, NothingToCompare, compare
from rl.report.evidence import evidence_of
from rl.report.run_sources import RunSources, read_sources
from rl.report.sentence import sentence
from rl.report.summary import arm_lines, as_markdown, as_record, as_table


def conclude(folder: Path, console: Console | None = None) -> None:
    """Say what the sweep in this folder found, and write it there."""
    report([folder], folder / "report.html", console=console)


def report(
    paths: Sequence[Path],
    page: Path,
    *,
    baseline: str | None = None,
    num_judged: int = 1,
    console: Console | None = None,
) -> bool:
    """Compare the runs of these folders; print what they say, write the page, say if there is one.

    Args:
        paths: of sweeps, of runs, of folders of runs.
        page: that is written, its figures and numbers beside it.
        baseline: the arm that the others are compared with; None: the first.
        num_judged: evaluations at the end of a run that are averaged.
        console: standard output unless given.

    Raises:
        NoBaseline: the baseline that was named cannot be one; nothing was written.

    """
    console = console or Console()
    sources = read_sources(paths)
    arms = arms_of([evidence_of(run, num_judged) for run in sources.runs])
    comparison = None
    try:
        comparison = compare(
            arms,
            baseline=baseline,
            question=sources.question,
            num_judged=num_judged,
            notes=sources.notes,
        )
        text = sentence(comparison)
    except NoBaseline:  # before the summary, which stands as it is
        raise
    except NothingToCompare as nothing:
        text = f"{nothing}."
    _print(console, sources, comparison, arms, text)
    try:
        if page.parent in paths and arms:
            _write_summary(page.parent, comparison, arms, text)
        return comparison is not None and _write(console, comparison, page, sources.command)
    except OSError as error:  # the folder of somebody else, a full disk
        problem = f"nothing could be written ({error}): name another place, out=.../report.html"
        console.print(Text(problem, "yellow"), soft_wrap=True)
        return False


def show(comparison: Comparison, page: Path, console: Console) -> bool:
    """Print a comparison and write its page; whether there is one."""
    _print(console, RunSources(question=comparison.question), comparison, comparison.arms,
           sentence(comparison))  # fmt: skip
    return _write(console, comparison, page, "")


def _write(console: Console, comparison: Comparison, page: Path, command: str) -> bool:
    page.parent.mkdir(parents=True, exist_ok=True)
    record = json.dumps(as_record(comparison, comparison.arms), indent=1)
    page.with_suffix(".json").write_text(record + "\n")
    written = _write_page(console, comparison, page, command)
    place = page if written else page.with_suffix(".json")
    console.print(Text(f"\n{place}", "dim"), soft_wrap=True)
    return written


def _write_page(console: Console, comparison: Comparison, page: Path, command: str) -> bool:
    try:
        # Altair takes a second to import: the numbers are there before it.
        from rl.report.page import write_page

        write_page(comparison, page, command=command)
    except Exception as error:  # noqa: BLE001 a picture must not cost the numbers
        console.print(Text(f"the page is missing: {type(error).__name__}: {error}", "yellow"))
        return False
    return True


def _write_summary(
    folder: Path, comparison: Comparison | None, arms: Sequence[Arm], text: str
) -> None:
    lines = arm_lines(comparison, arms)
    (folder / "summary.md").write_text(as_markdown(lines, text))
    (folder / "summary.json").write_text(json.dumps(lines, indent=1) + "\n")


def _print(
    console: Console,
    sources: RunSources,
    comparison: Comparison | None,
    arms: Sequence[Arm],
    text: str,
) -> None:
    if sources.question:
        console.print(Text(f"\n{sources.question}", "dim"), soft_wrap=True)
    console.print(Text(f"\n{text}\n", "bold"), soft_wrap=True)
    if arms:
        console.print(as_table(comparison, arms))
    for note in comparison.notes if comparison else sources.notes:
        console.print(Text(f"! {note}", "yellow"), soft_wrap=True)
