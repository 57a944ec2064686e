"""Run a campaign of faults, and continue it by the same command.

    python -m tests.faults --runs 10 --seed 0 [--folder FOLDER] [--only "KILL inference"]
    python -m tests.faults --runs 10 --seed 3 --real       the real vLLM, which is killed once

Each finished case appends its row to results-SEED.jsonl of the folder. Needs root for the cases
with a full disk and a read-only folder, which are mounts. Exits with status 1 if a case failed.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from tests.faults.running import RealRun, ScriptedRun, run
from tests.faults.table import cases, real_cases


def main() -> int:
    """Run the cases that have no row yet; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/faults"))
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument("--real", action="store_true", help="kill the real vLLM once in each run")
    chosen = parser.parse_args()
    drawn = (real_cases if chosen.real else cases)(chosen.runs, chosen.seed)
    results = chosen.folder.resolve() / f"results-{chosen.seed}{'-real' * chosen.real}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    done = {row["case"] for row in rows}
    for case in drawn:
        if case.key in done or chosen.only not in case.fault.name:
            continue
        folder = results.parent / f"{chosen.seed}-{case.number}"
        shutil.rmtree(folder, ignore_errors=True)  # of a case that was interrupted
        rows.append(row := run(case, folder, RealRun if chosen.real else ScriptedRun))
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(row), flush=True)  # noqa: T201
    failed = [row["case"] for row in rows if not row["ok"]]
    print(f"{len(rows)} cases, {len(failed)} failed", *failed, sep="\n")  # noqa: T201
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
