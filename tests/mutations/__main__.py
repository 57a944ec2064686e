"""Put plausible mistakes into a copy of the code, one at a time, and see which tests fail.

    python -m tests.mutations                          every mistake
    python -m tests.mutations --select "objective*"    mistakes by name

This is too slow for the suite. `tests/test_mutations.py` checks only that every mistake still
applies to the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

REPO = Path(__file__).parents[2]
# A test process ends with 0 if all tests pass, and with 1 or 2 if a test or an import fails.
OUTCOMES = {0: "NOT NOTICED", 1: "noticed", 2: "noticed"}


@dataclass
class Mutation:
    """A plausible mistake in one file: the text `old`, which occurs once, becomes `new`."""

    name: str  # begins with the module
    file: str
    tests: list[str]  # arguments of pytest
    old: str = ""
    new: str = ""

    def applied(self, root: Path) -> str:
        """Return the file with the mistake; ValueError if `old` does not occur exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def _read(lines: list[str]) -> list[Mutation]:
    """Return the mistakes of these lines, whose format mistakes.txt describes."""
    found: list[Mutation] = []
    file, tests = Path(), list[str]()
    for line in lines:
        start, rest = line[:2], line[2:]
        if start == "  ":
            found.append(Mutation(f"{file.stem}: {rest}", str(file), tests))
        elif start == "- ":
            found[-1].old += "\n" * bool(found[-1].old) + rest
        elif start == "+ ":
            found[-1].new += "\n" * bool(found[-1].new) + rest
        elif start != "# ":
            name, *named = line.split()
            file = Path(name)
            tests = named or [f"tests/{file.parent}/test_{file.stem}.py"]
    return found


MUTATIONS = _read(Path(__file__).with_name("mistakes.txt").read_text().splitlines())


def outcome_of(mutation: Mutation, root: Path) -> tuple[str, str]:
    """Run the tests with the mistake; return the outcome and the first test that failed."""
    if mutation.tests[0].startswith("tests/runs/"):
        return "only with vLLM", mutation.tests[0]
    path = root / mutation.file
    before = path.read_text()
    path.write_text(mutation.applied(root))
    command = ["nice", "-n", "10", sys.executable, "-m", "pytest", "-x", "-q", "-p"]
    command += ["no:cacheprovider", "-m", "not server and not gpu", *mutation.tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(  # pytest's limit for a test does not end an import that hangs
            command, cwd=root, env=environment, timeout=900, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return "NO ANSWER", "still running after 900 s"
    finally:
        path.write_text(before)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    first = failed[0].partition(" - ")[0] if failed else ended.stdout.strip()[-300:]
    return OUTCOMES.get(ended.returncode, "NO ANSWER"), first


def main() -> int:
    """Return 0 if tests notice every mistake that has no test with the real vLLM."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--select", nargs="*", default=["*"], help="names, with * and ?")
    asked = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root, left_out = Path(folder, "repo"), (".git", ".venv", "outputs", "__pycache__")
        shutil.copytree(REPO, root, ignore=shutil.ignore_patterns(*left_out))
        (root / ".venv").symlink_to(REPO / ".venv")
        for mutation in MUTATIONS:
            if any(fnmatch(mutation.name, pattern) for pattern in asked.select):
                outcome, first = outcome_of(mutation, root)
                missed += [mutation.name] if outcome.isupper() else []
                print(f"{outcome}: {mutation.name}: {first}", flush=True)  # noqa: T201
    print(f"{len(missed)} not noticed", *missed, sep="\n")  # noqa: T201
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
