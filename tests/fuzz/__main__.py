"""Read damaged inputs; the same command continues after a case that ended the process.

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
from itertools import chain
from pathlib import Path

from rl.runtime.files import write_atomically
from tests.fuzz.cases import findings, input_of, problem_of
from tests.fuzz.readers import READERS


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
    running = file.with_suffix(".txt")  # the number of the case that is being read
    first = int(running.read_text()) + 1 if running.is_file() else 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        reader = READERS[chosen.reader](Path(folder))
        if chosen.only is not None:
            made = input_of(reader, chosen.reader, chosen.seed, chosen.only)
            print(repr(made)[:2000])  # noqa: T201
            print(problem_of(reader, made) or "no problem")  # noqa: T201
            reader.read(made)
            return 0
        drawn = chosen.reader, chosen.seed, range(first, chosen.cases)
        with file.open("a" if first else "w") as opened:
            ended = [(first - 1, "the process ended or hung")] if first else []
            found = findings(reader, *drawn, running=lambda n: write_atomically(running, str(n)))
            for number, problem in chain(ended, found):
                opened.write(json.dumps({"case": number, "problem": problem}) + "\n")
                opened.flush()
    running.unlink(missing_ok=True)
    lines = file.read_text().splitlines()
    what = f"{chosen.cases} cases with seed {chosen.seed}"
    print(f"{chosen.reader}: {what}, {len(lines)} findings", *lines[:20], sep="\n")  # noqa: T201
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
