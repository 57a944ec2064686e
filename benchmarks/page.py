"""Runs the programs beside this file, keeps what they print, and writes docs/benchmarks.md.

    python -m benchmarks.page                               the page, of what was measured so far
    python -m benchmarks.page updating "pushing --vllm"     these first; the others keep their day
    python -m benchmarks.page --all                         every program: an hour, and 16 GiB

What a program printed lies in measured/<program>.jsonl, by its command; the same command replaces
it. What a column means, beside whom we are measured and what is left out say the docstrings.
"""

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl.run.commit import commit_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
OWN_PAGE = "compositions"  # says yes or no, on a page of its own
HEAD = """# Benchmarks

Written by `python -m benchmarks.page`, which also runs a program again (`... page updating`;
`make bench`: all of them). A program prints one JSON line a measurement, a row of its table here.
A load is what else wanted the two cores (x86-64, bf16 without AMX) as it began; nothing was
measured on a GPU. Where no peer is named, no other's program was measured; an empty cell was not
kept. What was asked and concluded: docs/experiments.md. Which choices train together:
docs/compositions.md.
"""

Measurement = Mapping[str, Any]  # command, day, commit, load, lines


def programs() -> list[str]:
    """Return the names of all programs that measure something."""
    names = [path.stem for path in sorted(HERE.glob("[!_]*.py"))]
    return [name for name in names if name not in (OWN_PAGE, Path(__file__).stem)]


def measured(program: str) -> list[Measurement]:
    """Return what is known of a program, a measurement for each command."""
    path = _kept(program)
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def measure(command: str) -> bool:
    """Run `<program> [argument ...]` and keep what it prints, unless it fails; say whether not."""
    program, *arguments = shlex.split(command)
    load = f"a load of {os.getloadavg()[0]:.0f}"
    ran = [sys.executable, "-m", f"benchmarks.{program}", *arguments]
    done = subprocess.run(ran, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return False
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    day, commit = datetime.now(UTC).date().isoformat(), commit_of()
    commit = commit[:7] + commit[40:]  # +uncommitted stays
    fresh = {"command": command, "day": day, "commit": commit, "load": load, "lines": lines}
    others = [one for one in measured(program) if one["command"] != command]
    _kept(program).write_text("".join(json.dumps(one) + "\n" for one in [*others, fresh]))
    return True


def page() -> str:
    """Return the page: a chapter for each program, a table for each command."""
    return "\n".join([HEAD, *("\n".join(_chapter(program)) for program in programs())])


def _kept(program: str) -> Path:
    return HERE / "measured" / f"{program}.jsonl"


def _chapter(program: str) -> Iterator[str]:
    docstring = ast.get_docstring(ast.parse((HERE / f"{program}.py").read_text())) or ""
    yield from (f"## {program}", "", docstring, "")
    for one in measured(program):
        when = ", ".join(filter(None, (one["day"], one["commit"], one["load"])))
        yield from (f"`python -m benchmarks.{one['command']}` ({when}):", "")
        yield from (*_table(one["lines"]), "")
    if not measured(program):
        yield from (f"`python -m benchmarks.{program}`: no numbers are kept yet.", "")


def _table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for line in lines:
        yield f"| {' | '.join(_cell(line.get(column, '')) for column in columns)} |"


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {its}" for key, its in value.items())
    return f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    """Run what is asked for, write the page; exit status 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commands", nargs="*", metavar='"PROGRAM [ARGUMENT ...]"')
    parser.add_argument("--all", action="store_true", help="every program, with its defaults")
    asked = parser.parse_args()
    failed = [one for one in (programs() if asked.all else asked.commands) if not measure(one)]
    PAGE.write_text(page())
    if failed:
        sys.exit(f"failed, so their numbers are older ones: {', '.join(failed)}")


if __name__ == "__main__":
    main()
