"""Seconds until a run has done its first step, and until a mistake is answered, in two checkouts.

    python -m benchmarks.starting BEFORE AFTER    10 minutes

Runs alternate between the checkouts, each with a warm cache of its own. The numbers are medians of
three pairs; `ratio` is the median of after / before. From 4df5c0c to 553234a it was 0.98 for the
first step, 0.14 for a wrong loss and 0.87 for a typo.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._measuring import ratio, say

WRONG_LOSS = "def mine(tokens):\n    return -tokens.logprobs * tokens.advantages\n"
OWN = ["loss._target_=wrong_loss.mine", "~loss.clip_low", "~loss.clip_high"]
KINDS = {"first step": ["max_steps=1"], "wrong loss": OWN, "typo": ["loss.clip_hig=3"]}
LIMIT_S, NUM_PAIRS = 600, 3


def seconds(checkout: Path, overrides: list[str], work: Path, name: str) -> float:
    """Return the seconds until the command has ended; of a run, until its first step was logged."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "wrong_loss.py").write_text(WRONG_LOSS)
    command = [sys.executable, str(checkout / "train.py"), *overrides, f"run_name={name}"]
    environment = {**os.environ, "OFFBYONE_CACHE": str(work / "cache"), "PYTHONPATH": str(checkout)}
    metrics, began = work / name / "metrics.jsonl", time.time()
    run = [*command, f"output_dir={work}"]
    done = subprocess.run(run, cwd=work, env=environment, capture_output=True, timeout=LIMIT_S)
    logged = metrics.exists() and metrics.stat().st_size
    took = (metrics.stat().st_mtime if logged else time.time()) - began
    if ("max_steps=1" in overrides) == bool(done.returncode):
        raise RuntimeError(f"{' '.join(command)} ended unexpectedly: {done.stderr.decode()}")
    return took


def main() -> None:
    """Print one JSON line for each kind of start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, overrides in KINDS.items():
            pairs = [
                [
                    seconds(checkout.resolve(), overrides, Path(folder, str(i)), f"{kind[0]}{pair}")
                    for i, checkout in enumerate(arguments.checkouts)
                ]
                for pair in range(-1, NUM_PAIRS)
            ][1:]
            before, after = (list(times) for times in zip(*pairs, strict=True))
            medians = {"before_s": statistics.median(before), "after_s": statistics.median(after)}
            say(measured=kind, **medians, ratio=ratio(after, before))


if __name__ == "__main__":
    main()
