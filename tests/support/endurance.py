"""A long run of an environment that fails all the time: does it end well, and does anything grow?

    python -m tests.support.endurance [--steps 1000] [--every 50] [--output DIR]

The real vLLM, the tiny policy, batches of 8; of the environment's calls 10 % raise, 5 % hang, 5 %
return garbage (tests/support/faulty.py). Every `--every` steps one JSON line: resident MiB,
open files and threads of each process of the run. The last line is the verdict: how the run ended,
how often each cause was counted, what grew. Exit status 1 unless it ended well and nothing grew.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.run.folder import RunFolder
from rl.run.metrics import Row, column, read_metrics
from tests.support.launching import ROOT, below

SHARES = {"raises": 0.10, "hangs": 0.05, "garbage": 0.05}
RUN = [
    "env._target_=tests.support.faulty.FaultyReversal",
    *(f"+env.{name}={share}" for name, share in SHARES.items()),
    *("~env.min_length", "~env.max_length", "~env.num_train", "~env.num_eval"),
    "env.reward_weights={exact: 0.5, similarity: 0.5}",
    *("batch_size=8", "group_size=4", "sampler.max_staleness=40", "sampler.rollout_timeout=45"),
    *("model.warm_start.steps=40", "optim.learning_rate=2e-5"),
    *("trainer.checkpoint_every=200", "trainer.wait_timeout=300"),
]
CAUSES = ("rollout/errors", "stop/env_error", "stop/timeout", "stop/engine_error")
# After the first quarter, in which caches and pools fill: growth a run may show.
MOST_MEMORY, MOST_FILES, MOST_THREADS = 0.05, 12, 12

Sample = dict[str, dict[str, int]]  # process: {rss_mib, files, threads}


def sample(leader: int) -> Sample:
    """What every process below `leader` holds, and it too."""
    held: Sample = {}
    for pid in sorted({leader, *below(leader)}):
        place = Path("/proc", str(pid))
        try:
            status = dict(
                line.split(":\t", 1) for line in (place / "status").read_text().splitlines()
            )
            name = _name((place / "cmdline").read_bytes().decode().split("\0"), pid == leader)
            held[name] = {
                "rss_mib": int(status["VmRSS"].split()[0]) // 1024,
                "files": len(os.listdir(place / "fd")),
                "threads": int(status["Threads"]),
            }
        except (OSError, KeyError):  # it has just ended
            continue
    return held


def _name(command: Sequence[str], leads: bool) -> str:
    if leads:
        return "supervisor"
    known = ("rl.rollouts", "rl.trainer", "reaper.py", "api_server")
    return next((name for name in known if any(name in word for word in command)), command[0])


def growth(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """By process: the median of the last quarter less that of the second one."""
    quarter = max(len(samples) // 4, 1)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    names = set.intersection(*(set(one) for one in [*early, *late]))
    return {
        name: {
            what: _median(late, name, what) - _median(early, name, what)
            for what in ("rss_mib", "files", "threads")
        }
        | {"of_rss": _median(late, name, "rss_mib") / max(_median(early, name, "rss_mib"), 1) - 1}
        for name in sorted(names)
    }


def _median(samples: list[Sample], name: str, what: str) -> float:
    return statistics.median(one[name][what] for one in samples)


def too_much(grown: dict[str, dict[str, float]]) -> list[str]:
    """Names of the processes that grew by more than noise."""
    return [
        name
        for name, of in grown.items()
        if of["of_rss"] > MOST_MEMORY or of["files"] > MOST_FILES or of["threads"] > MOST_THREADS
    ]


def shares(rows: list[Row]) -> dict[str, float]:
    """Mean share of each cause over the whole run; a line without one counts as none."""
    return {name: round(sum(column(rows, name)) / len(rows), 4) for name in CAUSES}


def endure(steps: int, every: int, output: Path, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Do the run, print a line every so often, return the verdict."""
    folder = RunFolder(output / "endurance")
    command = [sys.executable, "train.py", f"output_dir={output}", f"run_name={folder.name}"]
    began = time.monotonic()
    with (output / "screen.log").open("w") as screen:
        process = subprocess.Popen(
            [*command, *RUN, f"max_steps={steps}", *extra],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
        )
        samples: list[Sample] = []
        while process.poll() is None:
            time.sleep(0.2)
            done = len(read_metrics(folder)) if folder.metrics.exists() else 0
            if done >= every * (len(samples) + 1) and (held := sample(process.pid)):
                samples.append(held)
                print(json.dumps({"steps": done, **held}), flush=True)  # noqa: T201
    rows, grown = read_metrics(folder), growth(samples) if len(samples) > 1 else {}
    return {
        "status": process.returncode,
        "steps": len(rows),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "causes": shares(rows) if rows else {},
        "grown": {name: {k: round(v, 3) for k, v in of.items()} for name, of in grown.items()},
        "too_much": too_much(grown),
        "well": process.returncode == 0 and len(rows) == steps and not too_much(grown),
    }


def main() -> int:
    """Endure as long as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options, extra = parser.parse_known_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="endurance-"))
    output.mkdir(parents=True, exist_ok=True)
    verdict = endure(options.steps, options.every, output.resolve(), extra)
    print(json.dumps({"verdict": verdict, "output": str(output)}), flush=True)  # noqa: T201
    return 0 if verdict["well"] else 1


if __name__ == "__main__":
    sys.exit(main())
