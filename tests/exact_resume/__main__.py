"""Run all compositions and print a line for each; exit with status 1 at a difference.

python -m tests.exact_resume [--only 0,3]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.exact_resume.compositions import difference, rows


def main() -> int:
    """Compare the chosen compositions; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="numbers of compositions")
    only = [int(number) for number in parser.parse_args().only.split(",") if number]
    failed = 0
    for number, row in enumerate(rows()):
        if only and number not in only:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="resume-") as output:
            problem = difference(number, row, Path(output))
        failed += bool(problem)
        what = " ".join(f"{group}={choice}" for group, choice in sorted(row.items()))
        seconds = time.monotonic() - began
        print(f"{number:2} {problem or 'equal'}  [{what}] {seconds:.0f} s", flush=True)  # noqa: T201
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
