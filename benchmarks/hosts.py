"""What a second host costs: the tiny policy's steps on one, and on two of a real Ray.

    python -m benchmarks.hosts [--steps 30] [k=v ...]

Needs `make cluster`. Hosts are loopback addresses with a node of Ray each, so both runs have the
same cores: vLLM one, the rank one. What differs is ours: TCP and a key instead of Unix sockets and
a file, gloo instead of shared memory. One JSON line each, medians in seconds:

    {"hosts": 2, "start": ..., "step": ..., "wait": ..., "update": ..., "push": ..., "of_one": ...}

`start` goes from the command to the first batch, the first time with the warm start; `of_one` is a
step as a part of that on one host.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rl.run.folder import RunFolder
from rl.run.metrics import column, read_metrics
from tests.support.ray_nodes import ray_nodes

REPO = Path(__file__).parents[1]
_FIRST = 5  # steps that are not counted: kernels and caches are made in them
_PARTS = ("step", "wait", "update", "push")


def measured(
    place: list[str], name: str, folder: Path, arguments: argparse.Namespace
) -> dict[str, float]:
    """Train there; return the medians of a step and its parts."""
    settings = [
        *(f"output_dir={folder}", f"run_name={name}", f"max_steps={arguments.steps}"),
        *("batch_size=128", "inference.replicas=1", "trainer.ranks=1", *place),
        *arguments.overrides,
    ]
    began = time.time()
    command = [sys.executable, "train.py", *settings]
    subprocess.run(command, cwd=REPO, check=True, stdout=sys.stderr)
    rows = read_metrics(RunFolder(folder / name))
    start = rows[0]["time"] - rows[0]["time/step"] - began
    medians = {part: statistics.median(column(rows[_FIRST:], f"time/{part}")) for part in _PARTS}
    return {"start": start, **medians}


def main() -> None:
    """Train on one host, then on two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    one: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for hosts in (1, 2):
            with ExitStack() as stack:
                place = ["cluster=local"]
                if hosts == 2:
                    ray = stack.enter_context(ray_nodes([1, 1]))
                    place = ["cluster=ray", "cluster.gpus=false", "cluster.ranks_per_node=1"]
                    place += [f"cluster.address={ray.address}"]
                found = measured(place, f"on{hosts}", Path(name), arguments)
            one = one or found
            line = {"hosts": hosts, **found, "of_one": found["step"] / one["step"]}
            print(json.dumps({part: round(value, 2) for part, value in line.items()}), flush=True)


if __name__ == "__main__":
    main()
