"""Print one stage of the first hour on a GPU, or what benchmarks/first_hour.sh --full measured.

    python -m benchmarks.first_hour                     names of the stages
    python -m benchmarks.first_hour STAGE               a JSON line for each result
    python -m benchmarks.first_hour --table OUT RUN...  a table of runs

Without a GPU the sizes are tiny, so that a CPU can try a stage. No stage needs vLLM. `runs` needs
the other packages of the project, the other stages only torch >= 2.11, transformers, peft, PyYAML,
xxhash and msgspec.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

STAGES = {  # the generator of each stage's lines
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
    """Yield a table of runs: medians of their steps, highest memory of the first GPU.

    The log of a run begins with the plan of plan.py, which has the estimated memory.
    """
    yield f"{machine()}\n"
    yield f"| stage | result | {' | '.join(METRICS)} | peak GiB |"
    yield f"|---|---|{'---|' * len(METRICS)}---|"
    for name in runs:
        used = read(folder / f"{name}.memory").split()
        metrics = read(folder / "runs" / name / "metrics.jsonl")
        steps = list(map(json.loads, metrics.splitlines()))
        done = (folder / f"{name}.ok").exists()
        cells = ["ok" if done else "failed" if (folder / f"{name}.log").exists() else "not run"]
        for metric in METRICS:
            values = [step[metric] for step in steps[1:] if metric in step]  # the first warms up
            cells.append(f"{statistics.median(values):.4g}" if values else "")
        cells.append(f"{max(map(int, used)) / 1024:.1f}" if used else "")
        yield f"| {name} | {' | '.join(cells)} |"


def read(path: Path) -> str:
    """Return the text of a file, or an empty string if there is none."""
    return path.read_text() if path.exists() else ""


def machine() -> str:
    """Return the name of the GPU and the versions of PyTorch and Python."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    main(sys.argv[1:])
