"""Read damaged inputs, and continue by the same command.

    python -m tests.fuzz tokens --cases 100000 --seed 0 [--folder FOLDER]
    python -m tests.fuzz tokens --seed 0 --only 1234       one case, with its traceback

Readers: config, tools, tokens, checkpoint, wire. Case 1234 of a seed is always the same input. A
case is a finding if the reader raises another error than the documented one, needs more than a
second of processor time or 200 MiB, or ends the process. Findings are appended to
READER-SEED.jsonl of the folder. Exits with status 1 if there are any.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rl.runtime.files import write_atomically
from tests.fuzz.cases import Limits, findings, input_of, problem_of
from tests.fuzz.readers import READERS

PIECE = 500  # cases between two notes of the progress


def main() -> int:
    """Read the cases that were not read yet; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/fuzz"))
    parser.add_argument("--only", type=int, help="read this case and show its error")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    file = chosen.folder / f"{chosen.reader}-{chosen.seed}.jsonl"
    state = file.with_suffix(".json")  # {"next": number, "running": the case that is being read}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        reader = READERS[chosen.reader](Path(folder))
        if chosen.only is not None:
            made = input_of(reader, chosen.reader, chosen.seed, chosen.only)
            print(repr(made)[:2000])  # noqa: T201
            print(problem_of(reader, made) or "no problem")  # noqa: T201
            reader.read(made)
            return 0
        done = json.loads(state.read_text()) if state.is_file() else {"next": 0, "seconds": 0.0}
        if (ended := done.pop("running", None)) is not None:
            done["next"] = ended + 1
            note(file, ended, "the process ended or hung")
        with Limits(lambda n: write_atomically(state, json.dumps({**done, "running": n}))) as it:
            while done["next"] < chosen.cases:
                began, first = time.monotonic(), done["next"]
                numbers = range(first, min(first + PIECE, chosen.cases))
                for number, problem in findings(reader, chosen.reader, chosen.seed, numbers, it):
                    note(file, number, problem)
                done["next"] = numbers.stop
                done["seconds"] += round(time.monotonic() - began, 2)
                write_atomically(state, json.dumps(done))
    found = file.read_text().splitlines() if file.is_file() else []
    what = f"{done['next']} cases with seed {chosen.seed} in {done['seconds']:.0f} s"
    print(f"{chosen.reader}: {what}, {len(found)} findings")  # noqa: T201
    for line in found[:20]:
        print(line[:300])  # noqa: T201
    return bool(found)


def note(file: Path, number: int, problem: str) -> None:
    """Append a finding."""
    with file.open("a") as opened:
        opened.write(json.dumps({"case": number, "problem": problem}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
