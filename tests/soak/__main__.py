"""Run many steps in pieces with faults, and continue by the same command.

    python -m tests.soak --steps 5000 [--piece 2500] [--seed 0] [--folder outputs/soak]

Each piece is one start of train.py with the scripted engine. vLLM answers 500, garbage and half a
body now and then, each process is paused once, and vLLM is killed once. Every second piece ends
because the rollouts process is killed. Samples of all processes are appended to samples.jsonl, and
table.md has a line per process (tests/soak/slopes.py).
"""

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

from rl.runtime.metrics import MetricsTail, read_metrics, steps_done
from rl.runtime.status import read_statuses
from tests.faults.running import ScriptedRun
from tests.faults.table import Case, Fault
from tests.soak.slopes import table
from tests.support.launching import alive, groups_below, stop, wait_for

EVERY = 5  # steps between two samples
PAUSE_S = 3.0
FAULTS = [
    {"fault": kind, "at": at, "times": 1, **more}
    for kind, first, every, more in (
        ("Status", 501, 997, {"status": 500}),
        ("Garbage", 701, 1499, {}),
        ("CutShort", 901, 1999, {}),
    )
    for at in range(first, 100_000, every)
]
OVERRIDES = [
    *("trainer.checkpoint_every=50", "evaluation.every=100", "record.num_groups=2"),
    *("trainer.wait_timeout=120", "env.num_train=100000", "model.hidden_size=32"),
    *("model.num_layers=1", "logger=console", "accept_changed_code=true"),
]


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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    samples, one = folder / "samples.jsonl", SoakRun(folder)
    while (done := one.folder.num_saved_steps()) < chosen.steps:
        number = _num_pieces(samples)
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


def _num_pieces(samples: Path) -> int:
    lines = samples.read_text().splitlines() if samples.is_file() else []
    return json.loads(lines[-1])["piece"] + 1 if lines else 0


def run_piece(one: SoakRun, number: int, done: int, last: int, rng: Random, samples: Path) -> str:
    """Run from step `done` to `last` with faults, and append samples. Return how it ended."""
    resume = ["resume=true"] if one.folder.has_results() else []
    process = one.start(f"max_steps={last}", *OVERRIDES, *resume)
    tail, step, due, killed = MetricsTail(one.folder), done, done, False
    groups, length = set[int](), last - done
    kill_vllm = done + rng.randint(length // 4, length // 2)
    victims = ["supervisor", "rollouts", "trainer.rank0", "inference"]
    pauses = {done + rng.randint(length // 2, length - 1): victim for victim in victims}
    end_early = last - rng.randint(1, max(length // 10, 1)) if number % 2 else last + 1
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
                if step >= kill_vllm and not killed:
                    killed = True
                    _signal(one.pid("inference"), signal.SIGKILL)
                for at in [at for at in pauses if step >= at]:
                    pid = one.pid(pauses.pop(at))
                    _signal(pid, signal.SIGSTOP)
                    time.sleep(PAUSE_S)
                    _signal(pid, signal.SIGCONT)
                if step >= end_early:
                    end_early = last + 1
                    _signal(one.pid("rollouts"), signal.SIGKILL)
        finally:
            stop(process)
        screen = output.result()
    if not wait_for(lambda: not alive(groups), 10):
        return f"left: {alive(groups)}"
    done = steps_done(read_metrics(one.folder))
    if process.returncode and not number % 2:
        return f"status {process.returncode} after {done} steps: {screen[-1500:]}"
    return f"status {process.returncode} after {done} steps"


def _signal(pid: int, number: int) -> None:
    if pid > 1:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
