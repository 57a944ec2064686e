"""Run stages of the first hour on a GPU, one JSON line each, or print the table of all results.

    python -m benchmarks.first_hour kernels losses update-0.6b --out outputs/first-hour
    python -m benchmarks.first_hour --table

A stage whose result exists is not run again. Each stage is a process with a time limit, so that a
stage that hangs or takes all the memory does not stop the others. No stage needs vLLM. `runs` needs
the other packages of the project, the other stages only torch >= 2.11, transformers, peft, PyYAML,
xxhash and msgspec.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

STAGES = {  # the generator of each stage's lines
    "kernels": "kernels.products",
    "losses": "kernels.losses",
    "prefixes": "update.prefixes",
    **{f"update-{size}": "update.updates" for size in ("0.6b", "1.7b", "4b", "moe")},
    **{f"push-{size}": "kernels.push" for size in ("0.6b", "4b")},
    "runs": "runs.runs",
}
LIMIT_S = 540
METRICS = ("rollout/tokens_per_s", "time/update", "time/push", "time/step", "mismatch/mean_abs")


def lines(stage: str, device: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Run a stage in this process and yield its results."""
    import torch  # seconds: only in the process of a stage

    module, _, name = STAGES[stage].rpartition(".")
    made = getattr(import_module(f"benchmarks.first_hour.{module}"), name)
    size = stage.partition("-")[2]
    return made(*filter(None, [size]), torch.device(device), tiny)


def main() -> None:
    """Run the named stages, or all; exit with status 1 if one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes at which a CPU can try the stages"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/first-hour"))
    parser.add_argument("--table", action="store_true", help="print the results as a table")
    parser.add_argument("--full", action="store_true", help="the stages are those of --full")
    parser.add_argument("--inside", action="store_true", help="run one stage in this process")
    asked = parser.parse_args()
    if asked.table:
        rows = full_table(asked.out, asked.stages) if asked.full else table(asked.out)
        print("\n".join(rows))
    elif asked.inside:
        for line in lines(asked.stages[0], asked.device, tiny=asked.tiny):
            print(json.dumps(line), flush=True)
    else:
        asked.out.mkdir(parents=True, exist_ok=True)
        failed = [stage for stage in asked.stages or STAGES if not run(stage, asked)]
        if failed:
            sys.exit(f"these stages failed (the same command runs them again): {' '.join(failed)}")


def run(stage: str, asked: argparse.Namespace) -> bool:
    """Run a stage unless its result exists; return whether its result exists now."""
    done, part = asked.out / f"{stage}.jsonl", asked.out / f"{stage}.part"
    if done.exists():
        print(f"{stage}: done before", flush=True)
        return True
    command = [sys.executable, "-m", __package__, stage, "--inside", "--device", asked.device]
    command += ["--tiny"] * asked.tiny
    began = time.monotonic()
    with part.open("w") as file:
        try:
            status = subprocess.run(command, stdout=file, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            status = f"no result after {LIMIT_S} s"
    print(f"{stage}: {status or 'ok'}, {time.monotonic() - began:.0f} s", flush=True)
    if status:
        return False  # the lines so far stay in the file .part
    part.rename(done)
    return True


def table(folder: Path) -> Iterator[str]:
    """Yield a Markdown table for docs/benchmarks.md; "not run" stands for a missing stage."""
    yield f"| stage | {machine()} |"
    yield "|---|---|"
    for stage in STAGES:
        printed = read(folder / f"{stage}.jsonl") or read(folder / f"{stage}.part")
        results = [json.loads(x) for x in printed.splitlines() if x.startswith("{")]
        for line in results or [{"result": "not run"}]:
            yield f"| {stage} | {', '.join(f'{key} {value}' for key, value in line.items())} |"


def full_table(folder: Path, stages: Sequence[str]) -> Iterator[str]:
    """Yield a table of runs: medians of their steps, planned and highest memory of the GPU."""
    yield f"{machine()}\n"
    yield f"| stage | result | {' | '.join(METRICS)} | plan GiB | peak GiB |"
    yield f"|---|---|{'---|' * len(METRICS)}---|---|"
    for stage in stages:
        log, used = folder / f"{stage}.log", read(folder / f"{stage}.memory").split()
        metrics = folder / "runs" / stage / "metrics.jsonl"
        steps = list(map(json.loads, read(metrics).splitlines()))
        done = (folder / f"{stage}.ok").exists()
        cells = ["ok" if done else "failed" if log.exists() else "not run"]
        for name in METRICS:
            values = [step[name] for step in steps[1:] if name in step]  # the first step warms up
            cells.append(f"{statistics.median(values):.4g}" if values else "")
        cells.append(planned_gib(read(log), metrics.with_name("config.yaml")) if steps else "")
        cells.append(f"{max(map(int, used)) / 1024:.1f}" if used else "")
        yield f"| {stage} | {' | '.join(cells)} |"


def read(path: Path) -> str:
    """Return the text of a file, or an empty string if there is none."""
    return path.read_text() if path.exists() else ""


def planned_gib(page: str, config: Path) -> str:
    """Return the GiB that a run may take on the first GPU, on which rank 0 trains.

    `page` begins with what plan.py printed. It has the least that vLLM needs. On a shared GPU the
    run gives vLLM a share of the GPU, which `config` contains.
    """
    trainer = re.search(r"^trainer.*? GPU \S.*?  +([\d.]+)  ", page, re.MULTILINE)
    size = re.search(r"each GPU has .*?([\d.]+) GiB", page)
    share = re.search(r"gpu_memory_utilization: ([\d.]+)", config.read_text())
    if not trainer:
        return ""
    return f"{float(trainer[1]) + (float(share[1]) * float(size[1]) if share and size else 0):.1f}"


def machine() -> str:
    """Return the name of the GPU and the versions of driver and PyTorch."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    main()
