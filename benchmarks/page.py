"""Run the programs beside this file, keep what they print, and write docs/benchmarks.md.

    python -m benchmarks.page                               the page, from the kept measurements
    python -m benchmarks.page updating "pushing --vllm"     run these first
    python -m benchmarks.page all                           run every program: an hour, and 16 GiB

measured/<program>.jsonl keeps one line a command; the same command replaces its line. The prose of
a program's docstring is its section of the page. A deleted program whose question is answered keeps
its measurements, and measured/<program>.md has its prose.
"""

import argparse
import ast
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl.runtime.commit import commit_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEAD = """\
`python -m benchmarks.page updating` runs a program again, `make bench` all of them, and both write
this page. The machine has two cores (x86-64, bf16 without AMX) and no GPU; "a load of 4" counts the
other processes that wanted them. An empty cell was not kept; `run` is the number of the command.
docs/experiments.md has the conclusions, docs/cuda.md the measurements of one H100.
"""
Measurement = Mapping[str, Any]  # command, day, commit, load, lines


def programs() -> list[str]:
    """Return the names of all programs with measurements, also of deleted ones."""
    return sorted(path.stem for path in (HERE / "measured").glob("*.jsonl"))


def measured(program: str) -> list[Measurement]:
    """Return the kept measurements of a program, one for each command."""
    path = HERE / "measured" / f"{program}.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def measure(command: str) -> bool:
    """Run `<program> [argument ...]` and keep what it prints; return False if it fails."""
    program, *arguments = shlex.split(command)
    load = f"a load of {os.getloadavg()[0]:.0f}"
    ran = [sys.executable, "-m", f"benchmarks.{program}", *arguments]
    done = subprocess.run(ran, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return False
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    day, commit = datetime.now(UTC).date().isoformat(), commit_of()
    commit = commit[:7] + commit[40:]  # the suffix +uncommitted stays
    fresh = {"command": command, "day": day, "commit": commit, "load": load, "lines": lines}
    others = [one for one in measured(program) if one["command"] != command]
    content = "".join(json.dumps(one) + "\n" for one in [*others, fresh])
    (HERE / "measured" / f"{program}.jsonl").write_text(content)
    return True


def page() -> str:
    """Return the page: a section for each program and its measurements."""
    sections = ["\n".join(_section(name)) for name in programs()]
    return "\n".join([f"# Benchmarks\n\n{_filled(HEAD)}\n", *sections])


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120)


def _section(program: str) -> Iterator[str]:
    yield from (f"## {program}", "", _filled(_prose(program)), "")
    kept, lines = measured(program), list[Measurement]()
    for number, one in enumerate(kept, 1):
        run = {"run": number} if len(kept) > 1 else {}
        lines += [run | line for line in one["lines"]]
    for one in kept:
        when = ", ".join((one["day"], one["commit"], one["load"]))
        yield f"- `python -m benchmarks.{one['command']}` ({when})"
    if lines:
        columns = list(dict.fromkeys(column for line in lines for column in line))
        yield from ("", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")
        for line in lines:
            yield f"| {' | '.join(_cell(line.get(column, '')) for column in columns)} |"
    yield ""


def _prose(program: str) -> str:
    if (deleted := HERE / "measured" / f"{program}.md").exists():
        return deleted.read_text()
    docstring = ast.get_docstring(ast.parse((HERE / f"{program}.py").read_text())) or ""
    # An indented paragraph has the commands.
    return " ".join(part for part in docstring.split("\n\n") if not part.startswith("    "))


def _cell(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    """Run the commands, then write the page; exit with status 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commands", nargs="*", metavar='"PROGRAM [ARGUMENT ...]"')
    asked = parser.parse_args().commands
    if asked == ["all"]:
        asked = [name for name in programs() if (HERE / f"{name}.py").exists()]
    failed = [one for one in asked if not measure(one)]
    PAGE.write_text(page())
    if failed:
        sys.exit(f"these commands failed and keep their old numbers: {', '.join(failed)}")


if __name__ == "__main__":
    main()
