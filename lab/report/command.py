"""The command line of report.py, and what it prints and writes.

report.json                             all numbers; written first
report.html  report.csv  figures/       the page (lab/report/page.py)
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lab.report.arms import arms_of
from lab.report.comparison import Comparison, NoBaseline, NothingToCompare, compare
from lab.report.conclusion import conclusion
from lab.report.sources import read_sources
from lab.report.summary import as_record, as_table
from lab.runs import folders_and_options

USAGE = """python report.py FOLDER [FOLDER ...] [key=value ...]

A folder is that of a sweep (outputs/sweeps/...), of a run, or one that holds runs. Keys:

  baseline=loss=grpo   the arm that the others are compared with (first one unless named)
  judged=3             evaluations at the end of each run that are averaged (1 unless given)
  out=report.html      the page; report.json, report.csv and figures/ are written beside it
                       (in the first folder unless given)

What each number is: docs/report.md"""
TAKEN = ("sweep", "summary", "versions")  # .json files of sweeps and runs
KEYS = ("baseline", "judged", "out")
OK, NO_PAGE, BAD_ARGUMENTS = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Write the report that the arguments ask for; return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)  # noqa: T201
        return OK if arguments else BAD_ARGUMENTS
    try:
        paths, options = folders_and_options(arguments, KEYS)
        if not paths:
            raise ValueError("name the folder of a sweep or of a run (outputs/...)")
        page, judged = _page_of(paths, options), options.get("judged", "1")
        if not judged.isdecimal() or int(judged) < 1:
            problem = f"judged={judged}: give the number of evaluations to average, 1 or more"
            raise ValueError(problem)
    except ValueError as problem:
        return _refused(problem)
    try:
        written = report(paths, page, baseline=options.get("baseline"), num_judged=int(judged))
    except NoBaseline as problem:
        return _refused(problem)
    return OK if written else NO_PAGE


def _refused(problem: ValueError) -> int:
    print(f"no report: {problem}", file=sys.stderr)  # noqa: T201
    return BAD_ARGUMENTS


def _page_of(paths: list[Path], options: dict[str, str]) -> Path:
    page = Path(options.get("out") or paths[0] / "report.html")
    if page.suffix != ".html":
        raise ValueError(f"out={page}: name a page that ends in .html")
    if page.stem in TAKEN:
        raise ValueError(f"out={page}: {page.stem}.json is another file's name: choose another")
    if "out" not in options and not paths[0].is_dir():
        raise ValueError(f"{paths[0]} does not exist")
    return page


def report(
    paths: Sequence[Path], page: Path, *, baseline: str | None = None, num_judged: int = 1
) -> bool:
    """Compare the runs of these folders, print the result, and write it if there is one.

    Args:
        paths: of sweeps, of runs, of folders of runs.
        page: the HTML file; figures and numbers are written beside it.
        baseline: the arm that the others are compared with; None: the first.
        num_judged: evaluations at the end of a run that are averaged.

    Returns:
        Whether the page was written.

    Raises:
        NoBaseline: the named arm cannot be the baseline; nothing was written.

    """
    console, comparison = Console(), None
    sources = read_sources(paths, num_judged)
    arms, notes = arms_of(sources.runs), sources.notes
    try:
        comparison = compare(
            arms,
            baseline=baseline,
            question=sources.question,
            num_judged=num_judged,
            notes=notes,
        )
        text, notes = conclusion(comparison), comparison.notes
    except NoBaseline:  # print no table
        raise
    except NothingToCompare as nothing:
        text = f"{nothing}."
    _print(console, sources.question, text, as_table(comparison, arms) if arms else "", notes)
    try:
        return comparison is not None and _write(console, comparison, page, sources.command)
    except OSError as error:  # no permission, or a full disk
        problem = f"nothing could be written ({error}): name another place, out=.../report.html"
        console.print(Text(problem, "yellow"), soft_wrap=True)
        return False


def show(comparison: Comparison, page: Path, console: Console) -> None:
    """Print a comparison and write its page."""
    table = as_table(comparison, comparison.arms)
    _print(console, comparison.question, conclusion(comparison), table, comparison.notes)
    _write(console, comparison, page, "")


def _print(console: Console, question: str, text: str, table: object, notes: Sequence[str]) -> None:
    if question:
        console.print(Text(f"\n{question}", "dim"), soft_wrap=True)
    console.print(Text(f"\n{text}\n", "bold"), soft_wrap=True)
    if table:
        console.print(table)
    for note in notes:
        console.print(Text(f"! {note}", "yellow"), soft_wrap=True)


def _write(console: Console, comparison: Comparison, page: Path, command: str) -> bool:
    """Write report.json, then the page; return whether the page was written."""
    page.parent.mkdir(parents=True, exist_ok=True)
    numbers = page.with_suffix(".json")
    numbers.write_text(json.dumps(as_record(comparison), indent=1) + "\n")
    written = True
    try:
        # Altair takes a second to import, so import it after the numbers are printed.
        from lab.report.page import write_page

        write_page(comparison, page, command=command)
    except Exception as error:  # noqa: BLE001 a failed drawing must not hide the numbers
        console.print(Text(f"the page is missing: {type(error).__name__}: {error}", "yellow"))
        written = False
    console.print(Text(f"\n{page if written else numbers}", "dim"), soft_wrap=True)
    return written
