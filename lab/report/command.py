"""The command line of report.py, and the files that it writes."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lab.report.arms import arms_of
from lab.report.comparison import Comparison, NothingToCompare, compare
from lab.report.conclusion import basis, conclusion, describe_power
from lab.report.numbers import Record, arm_records, as_json, as_table
from lab.report.sources import read_sources
from lab.runs import folders_and_options
from rl.runtime.start_record import program
from rl.runtime.text import printable

USAGE = """python report.py FOLDER [FOLDER ...] [key=value ...]

FOLDER is the folder of a sweep (outputs/sweeps/...), of a run, or of several runs. Keys:

  baseline=loss=grpo   the arm with which all other arms are compared (default: first arm)
  until.smallest_effect=0.03   decide after every seed; adds the decision "equal within 0.03"
  judged=3             average the last 3 evaluations of each run (default: 1)
  out=report.html      the page, in the same folder as report.json and figures/
                       (default: in the first FOLDER)

docs/report.md explains each number."""
EFFECT = "until.smallest_effect"
RESERVED_STEMS = ("sweep", "summary", "versions")  # a report must not overwrite these .json files
OK, NO_PAGE, BAD_ARGUMENTS = 0, 1, 2


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE.replace("python report.py", program("report")))  # noqa: T201
        return OK if arguments else BAD_ARGUMENTS
    try:
        paths, options = folders_and_options(arguments, ("baseline", "judged", "out", EFFECT))
        if not paths:
            raise ValueError("no folder: give the folder of a sweep or of a run (outputs/...)")
        page = Path(options.get("out") or paths[0] / "report.html")
        judged, effect = options.get("judged", "1"), options.get(EFFECT, "1")
        if page.suffix != ".html":
            raise ValueError(f"out={page}: give a file name that ends in .html")
        if page.stem in RESERVED_STEMS:
            raise ValueError(f"out={page} would overwrite {page.stem}.json: choose another name")
        if "out" not in options and not paths[0].is_dir():
            raise ValueError(f"{paths[0]} is not a folder: give the folder of a sweep or of a run")
        if not judged.isdecimal() or int(judged) < 1:
            raise ValueError(
                f"judged={judged}: give the number of evaluations to average, 1 or more"
            )
        if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", effect) or not float(effect):
            raise ValueError(f"{EFFECT}={effect}: give a difference above 0, such as 0.03")
        chosen = {"smallest_effect": options.get(EFFECT, ""), "num_judged": int(judged)}
        written = report(paths, page, baseline=options.get("baseline", ""), **chosen)
    except ValueError as problem:
        print(f"no report: {printable(str(problem))}", file=sys.stderr)  # noqa: T201
        return BAD_ARGUMENTS
    return OK if written else NO_PAGE


def report(
    paths: Sequence[Path],
    page: Path,
    *,
    baseline: str = "",
    num_judged: int = 1,
    smallest_effect: str = "",
) -> bool:
    """Compare the runs in `paths`. Print and write the result. Return whether it was written."""
    sources = read_sources(paths, num_judged)
    arms, question, notes = arms_of(sources.runs), sources.question, sources.notes
    labels = {" ".join(run.overrides): arm.label for arm in arms for run in arm.finished}
    try:
        comparison = compare(
            arms,
            baseline=baseline or (sources.baseline and labels.get(sources.baseline, "")),
            question=question,
            smallest_effect=float(smallest_effect or sources.smallest_effect or 0),
            num_judged=num_judged,
            notes=notes,
        )
    except NothingToCompare as nothing:
        _print_results(question, f"{nothing}.", arm_records(None, arms), notes)
        return False
    return show(comparison, page, sources.command)


def show(comparison: Comparison, page: Path, command: str = "") -> bool:
    """Print a comparison, write its page and .json file, and return whether both are written."""
    text, numbers = conclusion(comparison), page.with_suffix(".json")
    details = f"{basis(comparison)} {describe_power(comparison)}".rstrip()
    records = arm_records(comparison, comparison.arms)
    _print_results(comparison.question, text, records, comparison.notes, details)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        numbers.write_bytes(as_json(comparison))
        from lab.report.page import write_page  # a slow import, so the numbers are printed first

        write_page(comparison, page, command=command)
    except OSError as error:  # such as a full disk or a missing permission
        problem = f"not all files are written ({error}): choose another folder, out=.../report.html"
    except Exception as error:  # noqa: BLE001 a failed drawing must not hide the numbers
        problem = f"{numbers} is written, but not the page: {type(error).__name__}: {error}"
    else:
        Console().print(Text(f"\n{printable(str(page))}", "dim"), soft_wrap=True)
        return True
    Console().print(Text(printable(problem), "yellow"), soft_wrap=True)
    return False


def _print_results(
    question: str, text: str, arms: Sequence[Record], notes: Sequence[str], details: str = ""
) -> None:
    console = Console()
    if question:
        console.print(Text(f"\n{question}", "dim"), soft_wrap=True)
    console.print(Text(f"\n{text}\n", "bold"), soft_wrap=True)
    if details:
        console.print(Text(f"{details}\n", "dim"), soft_wrap=True)
    if arms:
        console.print(as_table(arms))
    for note in notes:
        console.print(Text(f"! {printable(note)}", "yellow"), soft_wrap=True)
