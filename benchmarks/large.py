"""A real run of a model of 440 million parameters: what each part takes, in seconds and GiB.

    python -m benchmarks.large [--adapter lora] [--steps 3] [--hidden 1024] [--layers 28] [k=v]

A Qwen3 of that size, drawn on the spot, plays reverse-text; a checkpoint after every step. One JSON
line: medians over the steps, and peaks of what the processes of a part hold, shared pages shared:

    {"start": ..., "generation": ..., "update": ..., "push": ..., "checkpoint": ..., "step": ...,
     "GiB": {"vllm": ..., "trainer": ..., "rollouts": ...}, "checkpoint_GiB": ...}

`start` goes from the command to the first weights live, `generation` is the wait for a batch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rl.run.folder import RunFolder
from rl.run.metrics import Row, column, read_metrics

REPO = Path(__file__).parents[1]
_GIB = 2**30
_PARTS = {b"rl.trainer": "trainer", b"rl.rollouts": "rollouts", b"vllm": "vllm", b"VLLM": "vllm"}


def command(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of the run."""
    sizes = {"hidden_size": arguments.hidden, "num_layers": arguments.layers}
    sizes |= {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    return [
        *(sys.executable, "train.py", f"output_dir={folder}", "run_name=large"),
        *(f"model.{key}={value}" for key, value in sizes.items()),
        *("model.warm_start=null", f"adapter={arguments.adapter}", "optim.learning_rate=1e-5"),
        *("batch_size=16", "group_size=8", f"max_steps={arguments.steps}"),
        *("trainer.checkpoint_every=1", "trainer.keep_checkpoints=1"),
        "trainer.tokens_per_micro_batch=1024",  # for a machine of 24 GiB
        "sync.max_mismatch=0.5",  # 28 untrained layers in bfloat16 round apart
        *arguments.overrides,
    ]


def held_by(leader: int) -> Counter[str]:
    """Bytes that the processes below this one hold, by part of the run."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    held: Counter[str] = Counter()
    for pid in parents:
        above = pid
        while above not in (0, leader):
            above = parents.get(above, 0)
        if above != leader or pid == leader:
            continue
        with suppress(OSError, StopIteration):
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            title += Path(f"/proc/{pid}/comm").read_bytes()
            part = next(name for word, name in _PARTS.items() if word in title)
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            held[part] += next(int(li.split()[1]) for li in rollup if li.startswith("Pss:")) * 1024
    return held


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def seconds_of(rows: list[Row], began: float) -> dict[str, float]:
    """What a run's metrics say of its parts."""
    names = {"wait": "generation", "update": "update", "push": "push", "checkpoint": "checkpoint"}
    first = rows[0]["time"] - rows[0]["time/step"] - began
    medians = {
        # The first line knows no checkpoint yet: each has that of the step before.
        name: statistics.median(column(rows[1:] or rows, f"time/{key}"))
        for key, name in names.items()
    }
    step = statistics.median(column(rows[1:] or rows, "time/step"))
    return {"start": first, **medians, "step": step}


def main() -> None:
    """Run it, watch its memory, and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapter", default="none")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        began, peaks = time.time(), Counter[str]()
        run = subprocess.Popen(command(arguments, Path(name)), cwd=REPO, stdout=sys.stderr)
        while run.poll() is None:
            peaks |= held_by(run.pid)  # the larger of both
            time.sleep(1.0)
        if run.returncode:
            sys.exit(run.returncode)  # it has said why
        folder = RunFolder(Path(name, "large"))
        rows = read_metrics(folder)
        line = {
            "adapter": arguments.adapter,
            **{part: round(took, 2) for part, took in seconds_of(rows, began).items()},
            "GiB": {part: round(held / _GIB, 2) for part, held in sorted(peaks.items())},
            "checkpoint_GiB": round(size_of(folder.complete_checkpoints()[-1]) / _GIB, 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
