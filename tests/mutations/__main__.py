"""Run the mutations and print a table (see the package)."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table

from rl.runtime.child import Child, Reaper
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import REPO, Mutation

NOTICED, UNNOTICED, SERVER, BROKEN = "noticed", "not noticed", "only with vLLM", "no answer"
Result = dict[str, object]


def copy_of(repo: Path, folder: Path) -> Path:
    """Copy all files that git tracks or would track, and link the virtual environment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=repo, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (repo / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repo / name, folder / name)
    if (repo / ".venv").exists():
        (folder / ".venv").symlink_to((repo / ".venv").resolve())
    return folder


@contextmanager
def mistaken(mutation: Mutation, root: Path) -> Iterator[None]:
    """Apply the mistake, and restore the file when the block ends."""
    path = root / mutation.file
    before = path.read_text()
    path.write_text(mutation.applied(root))
    try:
        yield
    finally:
        path.write_text(before)


def run_tests(root: Path, tests: tuple[str, ...], timeout: float) -> tuple[bool | None, str]:
    """Return True, False or None (unknown) for pass, and the name of the first failed test."""
    command = ["env", "-C", str(root), "nice", "-n", "10", sys.executable, "-m", "pytest", "-x"]
    command += ["-q", "-p", "no:cacheprovider", "-m", "not server and not gpu", *tests]
    log, environment = root / "mutation.log", {"PYTHONDONTWRITEBYTECODE": "1"}
    log.unlink(missing_ok=True)
    deadline = time.monotonic() + timeout
    with (
        Reaper() as reaper,
        Child("pytest", command, log=log, reaper=reaper, env=environment) as it,
    ):
        while it.returncode is None:
            if time.monotonic() > deadline:
                return None, f"still running after {timeout:g} s"
            time.sleep(0.1)
        status = it.returncode
    output = log.read_text(errors="replace")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    first = failed[0].partition(" - ")[0] if failed else output.strip()[-300:]
    return {0: True, 1: False, 2: False}.get(status), first


def judged(mutation: Mutation, root: Path, timeout: float) -> Result:
    """Return the outcome of one mistake."""
    began = time.monotonic()
    result: Result = {"name": mutation.name, "file": mutation.file}
    try:
        mutation.applied(root)
    except ValueError as error:
        return result | {"outcome": BROKEN, "by": str(error), "seconds": 0.0}
    with mistaken(mutation, root):
        passed, by = run_tests(root, mutation.tests, timeout) if mutation.tests else (True, "")
    outcome = {None: BROKEN, False: NOTICED, True: SERVER if mutation.server else UNNOTICED}[passed]
    by = mutation.server if outcome == SERVER else by if outcome != UNNOTICED else ""
    return result | {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - began, 1)}


def red_without_mistake(root: Path, mutations: list[Mutation], timeout: float) -> list[str]:
    """Return the first test that fails without a mistake, because it would notice anything."""
    files = sorted({test.partition("::")[0] for one in mutations for test in one.tests})
    passed, first = run_tests(root, tuple(files), timeout)
    return [] if passed else [first]


def table_of(results: list[Result]) -> Table:
    """Return the table, with unnoticed mistakes first."""
    table = Table("mistake", "file", "outcome", "by", box=None)
    order = [BROKEN, UNNOTICED, SERVER, NOTICED]
    for row in sorted(results, key=lambda row: (order.index(str(row["outcome"])), row["name"])):
        table.add_row(*(str(row[key]) for key in ("name", "file", "outcome", "by")))
    return table


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--select", nargs="*", default=["*"], help="names, with * and ?")
    parser.add_argument("--results", type=Path, default=Path("outputs/mutations.jsonl"))
    parser.add_argument("--resume", action="store_true", help="keep existing results")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes tried in parallel")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a mistake")
    parser.add_argument(
        "--baseline", action="store_true", help="first run the tests without a mistake"
    )
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Return 0 if tests noticed every mistake that has no test with the real vLLM."""
    asked, console = arguments(), Console()
    chosen = [m for m in MUTATIONS if any(fnmatch(m.name, pattern) for pattern in asked.select)]
    if asked.list:
        console.print(*(f"{m.file}: {m.name}" for m in chosen), sep="\n", highlight=False)
        return 0
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        asked.results.read_text().splitlines() if asked.resume and asked.results.exists() else []
    )
    results: dict[str, Result] = {row["name"]: row for row in map(json.loads, lines)}
    waiting = [m for m in chosen if m.name not in results]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        places: SimpleQueue[Path] = SimpleQueue()
        for number in range(asked.jobs):
            places.put(copy_of(REPO, Path(folder) / str(number)))
        if asked.baseline and (red := red_without_mistake(Path(folder) / "0", waiting, 3600)):
            console.print(f"fails without a mistake: {red[0]}", highlight=False)
            return 2

        def one(mutation: Mutation) -> Result:
            root = places.get()
            try:
                return judged(mutation, root, asked.timeout)
            finally:
                places.put(root)

        with ThreadPoolExecutor(asked.jobs) as pool, asked.results.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in results.values())
            for future in as_completed([pool.submit(one, mutation) for mutation in waiting]):
                row = future.result()
                results[str(row["name"])] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                console.print(f"{row['outcome']}: {row['name']} ({row['seconds']} s)")
    shown = [results[m.name] for m in chosen]
    console.print(table_of(shown))
    missed = sum(row["outcome"] in (UNNOTICED, BROKEN) for row in shown)
    console.print(f"{len(shown) - missed} of {len(shown)} noticed, or have a server test")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
