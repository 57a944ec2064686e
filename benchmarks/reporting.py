"""How long a report of a large sweep takes, and how large its page is.

    python -m benchmarks.reporting [--arms 12] [--seeds 5] [--steps 2000] [--questions 64]

Runs are made up (some 1 KB of metrics a step, an evaluation every 25 steps); `report.py` reads them
in a process of its own. Seconds are the processor's, so that other work on the machine matters
little; the first report of a machine also bundles the script of the charts, hence two. JSON lines:

    {"what": "report", "runs": ..., "seconds": ..., "page_mb": ...}
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml

from rl.run.folder import RunFolder

NAMES = (
    *("train/reward", "train/loss", "train/entropy", "train/clip_fraction", "train/grad_norm"),
    *("mismatch/mean_abs", "mismatch/max_abs", "staleness/mean", "rollout/truncated"),
    *("rollout/mean_length", "rollout/zero_spread", "rollout/errors", "time/wait", "time/update"),
    *("time/push", "time/probe", "time/step", "train/tokens", "rollout/tokens_per_s"),
    *(f"other/metric_{index}" for index in range(25)),
)
EVERY = 25


def make_run(folder: Path, loss: str, seed: int, steps: int, questions: int) -> None:
    """A run with random numbers in all that a real one writes."""
    rng, run = np.random.default_rng(seed), RunFolder(folder)
    folder.mkdir(parents=True)
    with run.metrics.open("w") as file:
        for step in range(steps):
            row = {"step": step, "time": 1.7e9 + step}
            row |= dict(zip(NAMES, rng.random(len(NAMES)).tolist(), strict=True))
            if step % EVERY == 0:
                row["eval/reward"] = 0.5
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"step": steps, "time": 1.7e9, "eval/reward": 0.5}) + "\n")
    for version in (0, steps):
        with run.evaluation_of(version).open("w") as file:
            for example in range(questions):
                asked = {"role": "user", "content": f"How many are {example} and {example}? " * 4}
                for reward in rng.random(4).round().tolist():
                    line = {"example": example, "env": "sums", "messages": [asked]}
                    file.write(json.dumps({**line, "reward": reward}) + "\n")
    settings = {f"group.key_{index}": index for index in range(120)}
    config = {"seed": seed, "run_name": folder.name, "max_steps": steps, "loss": loss, **settings}
    run.config.write_text(yaml.safe_dump(config))
    run.overrides.write_text(yaml.safe_dump({"overrides": [f"loss={loss}", f"seed={seed}"]}))
    run.versions.write_text(json.dumps({f"package-{index}": "1.0" for index in range(200)}))


def main() -> None:
    """Make the runs, report them twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        runs, page = Path(place, "runs"), Path(place, "report.html")
        for arm in range(asked.arms):
            for seed in range(asked.seeds):
                folder = runs / f"loss{arm:02d}-s{seed}"
                make_run(folder, f"loss{arm:02d}", seed, asked.steps, asked.questions)
        for what in ("first report", "report"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "report.py", str(runs), f"out={page}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            line = {"what": what, "runs": asked.arms * asked.seeds, "seconds": round(seconds, 2)}
            print(json.dumps(line | {"page_mb": round(page.stat().st_size / 1e6, 2)}), flush=True)


if __name__ == "__main__":
    main()
