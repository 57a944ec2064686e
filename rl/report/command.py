"""The command line of report.py: folders, and a few keys."""

import sys
from pathlib import Path

from rl.report.comparison import NoBaseline
from rl.report.conclude import report

USAGE = """python report.py FOLDER [FOLDER ...] [key=value ...]

A folder is that of a sweep (outputs/sweeps/...), of a run, or one that holds runs. Keys:

  baseline=loss=grpo   the arm that the others are compared with (first one unless named)
  judged=3             evaluations at the end of each run that are averaged (1 unless given)
  out=report.html      the page; report.json, report.csv and figures/ are written beside it
                       (in the first folder unless given)

What each number is: docs/report.md"""
TAKEN = ("sweep", "summary", "versions")  # .json of sweeps and runs, beside which a page may lie
KEYS = ("baseline", "judged", "out")
OK, NO_PAGE, BAD_ARGUMENTS = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Write the report that the arguments ask for; the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)  # noqa: T201
        return OK if arguments else BAD_ARGUMENTS
    options: dict[str, str] = {}
    paths = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        # A folder may have a "=" in its name, so what exists is a folder.
        if not value or Path(argument).exists():
            paths.append(Path(argument))
        elif key in KEYS:
            options[key] = value
        else:
            return _refuse(f"{argument}: the keys are {', '.join(KEYS)}")
    if not paths:
        return _refuse("name the folder of a sweep or of a run (outputs/...)")
    judged = options.get("judged", "1")
    if not judged.isdecimal() or int(judged) < 1:
        return _refuse(f"judged={judged}: give the number of evaluations to average, 1 or more")
    page = Path(options.get("out") or paths[0] / "report.html")
    if page.suffix != ".html":
        return _refuse(f"out={page}: name a page that ends in .html")
    if page.stem in TAKEN:
        return _refuse(f"out={page}: {page.stem}.json is another file's name: choose another")
    if "out" not in options and not paths[0].is_dir():
        return _refuse(f"{paths[0]} does not exist")
    baseline = options.get("baseline")
    return _written(paths, page, baseline, int(judged))


def _written(paths: list[Path], page: Path, baseline: str | None, num_judged: int) -> int:
    try:
        written = report(paths, page, baseline=baseline, num_judged=num_judged)
    except NoBaseline as problem:
        return _refuse(str(problem))
    return OK if written else NO_PAGE


def _refuse(problem: str) -> int:
    print(f"no report: {problem}", file=sys.stderr)  # noqa: T201
    return BAD_ARGUMENTS
