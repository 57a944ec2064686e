"""What a run says it takes of memory, beside what it takes: 0.8 and 440 million parameters.

    python -m benchmarks.memory [--cases tiny tiny-lora large large-lora] [override ...]

Runs of a few steps, one after another; the large ones, on request, want 16 GiB and some minutes.
One JSON line a part:

    {"case": "tiny", "part": "trainer", "estimated_GiB": 1.1, "peak_GiB": 1.15, "ratio": 0.96}

The peak of a trainer is the kernel's (VmHWM). vLLM is several processes, forked one from another:
what is their own or shared is added up by proportion, every quarter of a second, and what they map
of files, libraries mostly, counts once. Only on a CPU: a GPU's memory is not the kernel's to count.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rl.config.schema import Run
from rl.model.shape import GIB, shape_of
from rl.placement.budget import parts_of
from rl.placement.placement import placement
from rl.run.devices import this_host
from rl.run.folder import RunFolder

REPO = Path(__file__).parents[1]
_EVERY_S = 0.25
_SHORT = ["max_steps=3", "trainer.checkpoint_every=0"]
_LARGE = [
    *("model.hidden_size=1024", "model.num_layers=28", "model.num_heads=16"),
    *("model.num_kv_heads=8", "model.head_dim=128", "model.warm_start=null"),
    *("batch_size=8", "group_size=4", "trainer.tokens_per_micro_batch=256"),
    *("sync.max_mismatch=1e9", "inference.startup_timeout=1200", "trainer.wait_timeout=1800"),
]
CASES = {
    "tiny": [],
    "tiny-lora": ["adapter=lora"],
    "large": _LARGE,
    "large-lora": [*_LARGE, "adapter=lora"],
}
_PARTS = {"rl.trainer": "trainer", "vllm.entrypoints": "vLLM"}  # by the command of their group


def peaks(command: list[str], log: Path) -> dict[str, float]:
    """Return the GiB that each part took at most while a command ran."""
    most: dict[str, float] = {}
    with log.open("w") as file:
        # Whoever shares this machine should not be the one that it runs out of memory for.
        run = subprocess.Popen(
            ["/bin/sh", "-c", 'echo 1000 >/proc/self/oom_score_adj; exec "$@"', "sh", *command],
            stdout=file,
            stderr=file,
            cwd=REPO,
        )
        while run.poll() is None:
            for part, taken in _taken(run.pid).items():
                most[part] = max(most.get(part, 0.0), taken)
            time.sleep(_EVERY_S)
    if run.returncode:
        sys.exit(f"{' '.join(command)} ended with status {run.returncode}:\n{log.read_text()}")
    return most


def _taken(root: int) -> dict[str, float]:
    """GiB of each part now, its highest so far where the kernel knows that."""
    own: dict[str, float] = {}
    files: dict[str, float] = {}
    for pid in _descendants(root):
        with suppress(OSError, KeyError):  # it has ended
            part = _part(pid)
            if part is None:
                continue
            status = _numbers(Path(f"/proc/{pid}/status"))
            if part == "trainer":
                # It forks nothing that lasts: the largest process of the group is the rank.
                own[part] = max(own.get(part, 0.0), status["VmHWM"])
                continue
            # What both map of a push is the trainer's.
            shared = _numbers(Path(f"/proc/{pid}/smaps_rollup"))
            own[part] = own.get(part, 0.0) + shared["Pss_Anon"]
            files[part] = max(files.get(part, 0.0), status["RssFile"])
    return {part: taken + files.get(part, 0.0) for part, taken in own.items()}


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    left = [root]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        yield pid


def _part(pid: int) -> str | None:
    """Which part a process belongs to: what its group was started as."""
    command = Path(f"/proc/{os.getpgid(pid)}/cmdline").read_bytes().decode()
    return next((part for name, part in _PARTS.items() if name in command), None)


def _numbers(path: Path) -> dict[str, float]:
    """GiB by name, of a file of /proc."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return {name: int(value) / 2**20 for name, value in found}


def main() -> None:
    """One case after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=["tiny", "tiny-lora"], choices=CASES)
    arguments, overrides = parser.parse_known_args()
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as name:
            where = [f"output_dir={name}", "run_name=run"]
            command = [sys.executable, "train.py", *CASES[case], *_SHORT, *where, *overrides]
            measured = peaks(command, Path(name, "screen.log"))
            folder = RunFolder(Path(name, "run"))
            config = vars(Run.load(folder.config))
            shape = shape_of(folder.model())
            assert shape is not None
            parts = parts_of(config, placement(config, [this_host()]), shape)
            for part in {part.name: part for part in parts}.values():
                estimate, peak = part.need.on_host / GIB, measured[part.name]
                line = {"case": case, "part": part.name, "estimated_GiB": round(estimate, 2)}
                line |= {"peak_GiB": round(peak, 2), "ratio": round(estimate / peak, 2)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
