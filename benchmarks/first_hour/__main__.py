"""Print one stage of the first hour on a GPU, or what benchmarks/first_hour.sh --full measured.

    python -m benchmarks.first_hour                     names of the stages
    python -m benchmarks.first_hour STAGE               a JSON line for each result
    python -m benchmarks.first_hour --table OUT RUN...  a table of runs

Without a GPU the sizes are tiny, so that a CPU can try a stage. No stage needs vLLM. `runs` needs
the other packages of the project, the other stages only torch >= 2.11, transformers, peft, PyYAML,
xxhash and msgspec.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

STAGES = {  # the generator of each stage's lines
    "losses": "losses.losses",
    "prefixes": "update.prefixes",
    **{f"update-{size}": "update.updates" for size in ("0.6b", "1.7b", "4b", "moe")},
    **{f"push-{size}": "update.push" for size in ("0.6b", "4b")},
    "runs": "runs.runs",
}
METRICS = ("rollout/tokens_per_s", "time/update", "time/push", "time/step", "mismatch/mean_abs")


def main(words: Sequence[str]) -> None:
    """Print the names of the stages, the table, or the lines of a stage."""
    match words:
        case []:
            print("\n".join(STAGES))
        case ["--table", out, *runs]:
            print("\n".join(table(Path(out), runs)))
        case [stage]:
            print(machine(), file=sys.stderr)
            module, _, name = STAGES[stage].rpartition(".")
            lines = getattr(import_module(f"{__package__}.{module}"), name)
            on_gpu, size = torch.cuda.is_available(), stage.partition("-")[2]
            device = torch.device("cuda" if on_gpu else "cpu")
            for line in lines(*filter(None, [size]), device, tiny=not on_gpu):
                print(json.dumps(line), flush=True)
        case _:
            sys.exit(__doc__)


def table(folder: Path, runs: Sequence[str]) -> Iterator[str]:
    """Yield a table of runs: medians of their steps, planned and highest memory of the GPU."""
    yield f"{machine()}\n"
    yield f"| stage | result | {' | '.join(METRICS)} | plan GiB | peak GiB |"
    yield f"|---|---|{'---|' * len(METRICS)}---|---|"
    for name in runs:
        log, used = folder / f"{name}.log", read(folder / f"{name}.memory").split()
        metrics = folder / "runs" / name / "metrics.jsonl"
        steps = list(map(json.loads, read(metrics).splitlines()))
        done = (folder / f"{name}.ok").exists()
        cells = ["ok" if done else "failed" if log.exists() else "not run"]
        for metric in METRICS:
            values = [step[metric] for step in steps[1:] if metric in step]  # the first warms up
            cells.append(f"{statistics.median(values):.4g}" if values else "")
        cells.append(planned_gib(read(log), metrics.with_name("config.yaml")) if steps else "")
        cells.append(f"{max(map(int, used)) / 1024:.1f}" if used else "")
        yield f"| {name} | {' | '.join(cells)} |"


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
    """Return the name of the GPU and the versions of PyTorch and Python."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    main(sys.argv[1:])
