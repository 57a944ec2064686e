"""Seconds until a run has done its first step, and until a mistake is answered, in two checkouts.

    python -m benchmarks.starting BEFORE AFTER    10 minutes

Runs alternate between the checkouts, each with a warm cache of its own. The numbers are medians of
three pairs; `ratio` is the median of after / before.
"""

import argparse
import os
import re
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
    began = time.monotonic()
    child = subprocess.Popen(
        [*command, f"output_dir={work}"],
        cwd=work,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics, first = work / name / "metrics.jsonl", 0.0
    while child.poll() is None and time.monotonic() - began < LIMIT_S:
        if not first and metrics.exists() and metrics.stat().st_size:
            first = time.monotonic() - began
        time.sleep(0.02)
    took = first or time.monotonic() - began
    error = child.communicate()[1]
    if ("max_steps=1" in overrides) == bool(re.match("this run cannot start|the run", error)):
        raise RuntimeError(f"{' '.join(command)} ended unexpectedly: {error}")
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
