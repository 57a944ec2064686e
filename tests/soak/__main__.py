"""Run many steps in pieces with faults, and continue by the same command.

    python -m tests.soak --steps 5000 [--piece 2500] [--seed 0] [--folder outputs/soak]

Each piece is one start of train.py with the scripted engine. vLLM answers 500, garbage and half a
body now and then, each process is paused once, and vLLM is killed once. Every second piece ends
because the rollouts process is killed. Samples of all processes are appended to samples.jsonl, and
table.md has a line per process.

Each lifetime of a process is one block, because memory is correlated from step to step, but the
lifetimes of a process are independent. The slope of a process is the least-squares slope over all
its lifetimes, each with its own intercept. Its 95 % interval is that of 10,000 bootstrap samples of
whole lifetimes.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from rl.runtime.metrics import MetricsTail, read_metrics, steps_done
from rl.runtime.status import read_statuses
from tests.faults.running import ScriptedRun, send
from tests.faults.table import Case, Fault
from tests.support.launching import alive, groups_below, stop, wait_for

EVERY = 5  # steps between two samples
KILL, PAUSE = (signal.SIGKILL,), (signal.SIGSTOP, 3.0, signal.SIGCONT)
KINDS = {"Status": (501, 997), "Garbage": (701, 1499), "CutShort": (901, 1999)}  # first, every
FAULTS = [
    {"fault": kind, "at": at, "times": 1, **({"status": 500} if kind == "Status" else {})}
    for kind, (first, every) in KINDS.items()
    for at in range(first, 100_000, every)
]
OVERRIDES = ["trainer.checkpoint_every=50", "evaluation.every=100", "record.num_groups=2"]
OVERRIDES += ["trainer.wait_timeout=120", "env.num_train=100000", "model.hidden_size=32"]
OVERRIDES += ["model.num_layers=1", "logger=console", "accept_changed_code=true"]
WARM_UP = 1000  # steps of each lifetime that are left out: caches and allocators fill
FEWEST = 5  # samples of a lifetime that counts
Sample = Mapping[str, Any]
HEADS = ("process", "lifetimes", "samples", "memory", "slope", "interval")
HEADS += ("descriptors", "threads", "shared KiB")


class SoakRun(ScriptedRun):
    """The run of all pieces."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Case(0, Fault("soak", {"end"}), "", replicas=1, step=0), folder)
        (folder / "faults.json").write_text(json.dumps(FAULTS))

    def processes(self) -> dict[str, int]:
        """Return the process id of each process that runs now."""
        names = ("supervisor", "reaper", "inference", *read_statuses(self.folder))
        return {name: pid for name in dict.fromkeys(names) if (pid := self.pid(name)) > 1}


def sample(pid: int) -> dict[str, int]:
    """Return memory without files, shared memory, threads and descriptors of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    private, shared = (int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem"))
    found = {"pid": pid, "kib": private, "shared_kib": shared, "threads": int(fields["Threads"])}
    return {**found, "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


def main() -> int:
    """Run the pieces that are left, and write the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--piece", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/soak"))
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    samples, one = folder / "samples.jsonl", SoakRun(folder)
    while (done := one.folder.num_saved_steps()) < chosen.steps:
        lines = samples.read_text().splitlines() if samples.is_file() else []
        number = json.loads(lines[-1])["piece"] + 1 if lines else 0
        last = min(done + chosen.piece, chosen.steps)
        began = time.monotonic()
        status = run_piece(one, number, done, last, Random(f"{chosen.seed}:{number}"), samples)
        saved, seconds = one.folder.num_saved_steps(), time.monotonic() - began
        print(f"piece {number}: {done} to {saved}, {status}, {seconds:.0f} s", flush=True)  # noqa: T201
        if saved == done:
            print("the run makes no progress: see", one.folder.logs)  # noqa: T201
            return 1
    text = table(map(json.loads, samples.read_text().splitlines()))
    (folder / "table.md").write_text(f"{text}\n")
    print(text)  # noqa: T201
    return 0


def run_piece(one: SoakRun, number: int, done: int, last: int, rng: Random, samples: Path) -> str:
    """Run from step `done` to `last` with faults, and append samples. Return how it ended."""
    resume = ["resume=true"] if one.folder.has_results() else []
    process = one.start(f"max_steps={last}", *OVERRIDES, *resume)
    tail, step, due, groups, length = MetricsTail(one.folder), done, done, set[int](), last - done
    faults = [(done + rng.randint(length // 4, length // 2), "inference", KILL)]
    for victim in ("supervisor", "rollouts", "trainer.rank0", "inference"):
        faults.append((done + rng.randint(length // 2, length - 1), victim, PAUSE))
    if number % 2:
        faults.append((last - rng.randint(1, max(length // 10, 1)), "rollouts", KILL))
    tail.read()
    # Read the screen in a thread, because the supervisor would wait if the pipe were full.
    with ThreadPoolExecutor(1) as pool, samples.open("a") as file:
        output = pool.submit(process.stdout.read)  # pyright: ignore[reportOptionalMemberAccess]
        try:
            while process.poll() is None:
                time.sleep(0.05)
                groups |= groups_below(process.pid) if step >= due else set()
                step = max([step, *(row["step"] for row in tail.read())])
                if step >= due:
                    due = step + EVERY
                    for name, pid in one.processes().items():
                        with suppress(OSError, KeyError):  # the process has just ended
                            row = {"piece": number, "step": step, "process": name, **sample(pid)}
                            file.write(json.dumps(row) + "\n")
                    file.flush()
                for fault in [fault for fault in faults if step >= fault[0]]:
                    faults.remove(fault)
                    send(one.pid(fault[1]), fault[2])
        finally:
            stop(process)
        screen = output.result()
    if not wait_for(lambda: not alive(groups), 10):
        return f"left: {alive(groups)}"
    end = f"status {process.returncode} after {steps_done(read_metrics(one.folder))} steps"
    return f"{end}: {screen[-1500:]}" if process.returncode and not number % 2 else end


def table(samples: Iterable[Sample]) -> str:
    """Return the table of all processes as Markdown."""
    lines = [HEADS, ("---",) * len(HEADS)]
    by_process: dict[str, Any] = defaultdict(lambda: defaultdict(list))  # lifetimes of each process
    for sample in samples:
        by_process[sample["process"]][sample["piece"], sample["pid"]].append(sample)
    for name, own in sorted(by_process.items()):
        warm = (
            [each for each in life if each["step"] >= life[0]["step"] + WARM_UP]
            for life in own.values()
        )
        if not (lives := [life for life in warm if len(life) >= FEWEST]):
            continue
        memory = [sample["kib"] / 1024 for life in lives for sample in life]
        slope, low, high = slope_of(lives)
        between = f"{low:+.2f} to {high:+.2f}" if len(lives) > 1 else "one lifetime"
        sizes = f"{min(memory):.0f} to {max(memory):.0f} MiB", f"{slope:+.2f} KiB per step", between
        more = (
            " to ".join(str(max(life[end][key] for life in lives)) for end in (0, -1))
            for key in ("descriptors", "threads", "shared_kib")
        )
        lines.append((name, str(len(lives)), str(len(memory)), *sizes, *more))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def slope_of(lives: list[list[Sample]]) -> tuple[float, float, float]:
    """Return the slope in KiB per step, and its interval."""
    sums = []
    for life in lives:
        steps, memory = (np.array([each[k] for each in life], float) for k in ("step", "kib"))
        from_mean = steps - steps.mean()
        sums.append((from_mean @ memory, from_mean @ from_mean))
    pairs = np.array(sums)  # [lifetimes, 2]
    chosen = np.random.default_rng(0).integers(0, len(pairs), (10_000, len(pairs)))
    resampled = pairs[chosen].sum(1)  # [10,000, 2]
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    whole = pairs.sum(0)
    return float(whole[0] / whole[1]), float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())
