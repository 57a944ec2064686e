r"""Check that two checkouts train alike, bit for bit, on a scripted engine.

    python -m tests.support.equal_runs BEFORE AFTER [--only cispo,turns] [--output DIR]

Run train.py of both in parallel on several compositions. Compare metrics, rollouts, evaluations,
pushes and the weights of the checkpoints, except times (TIMES). Check also that each run learned:
gradients, rewards that vary, weights that change. Print a line per composition, and exit with
status 1 at the first difference. The engine is always the one beside this file, on PYTHONPATH.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.support.launching import Process, begin
from tests.support.scripted_vllm import fingerprints

# Keys that measure time; a name that ends in / matches all keys with this prefix.
TIMES = ("time", "time/", "generation_time", "rollout/generation_time", "rollout/tokens_per_s")

EVERY = [
    *("max_steps=6", "batch_size=32", "group_size=8", "seed=3", "model.warm_start=null"),
    *("trainer.num_threads=1", "trainer.checkpoint_every=3", "trainer.wait_timeout=240"),
    *("inference._target_=scripted_vllm.ScriptedVLLM", "inference.startup_timeout=60"),
    "sync.max_mismatch=1e9",
]
# All rollouts of a group get equal answers, so an advantage within the group would be 0.
WIKI = [
    *("env=wiki-search", "model=tiny-wiki", "env.reward_weights={exact: 1.0, f1: 1.0}"),
    *("advantage=none", "entropy_bonus=0.01", "group_size=2"),
    *("evaluation.num_examples=8", "evaluation.rollouts_per_example=2", "evaluation.every=3"),
]
SYNC = ["sampler=sync", "sampler.rollout_timeout=120"]
LAST = "checkpoints/step_000006/hf"
COMPOSITIONS: dict[str, list[str]] = {
    "cispo": [*SYNC],
    "grpo-kl": [*SYNC, "loss=grpo", "kl.beta=0.04"],
    "kl-in-reward": [*SYNC, "loss=grpo", "kl=k1", "kl.beta=0.04"],
    "critic": [*SYNC, "loss=ppo"],
    # The teacher is what "cispo" has trained, so that composition must run first.
    "distillation": [*SYNC, "loss=distill", f"reference.path=OUTPUT/cispo/{LAST}"],
    "ppo-two-updates": [*SYNC, "loss=ppo_clip", "updates_per_batch=2", "correction=tis_token"],
    "lora-merged": [*SYNC, "adapter=lora", "optim.learning_rate=5e-3"],
    "turns": [*SYNC, *WIKI],
    "turns-lora": [*SYNC, *WIKI, "adapter=lora", "optim.learning_rate=5e-3", "client=tokens"],
    "forks": [*SYNC, *WIKI, "client=tokens", "model.path=OUTPUT/rewriting"],
    "mixture": [*SYNC, "env=mixture", "buffer=difficulty", "evaluation=default"],
    "difficulty-order": [*SYNC, "order=difficulty"],
    "sft": ["loss=sft", "sampler=demonstrations"],
    "two-ranks": [*SYNC, "loss=grpo", "trainer.ranks=2", "deepspeed=zero2"],
}
WAIT_S = 900
Record = tuple[str, dict[str, Any]]  # the location and content of something that must be equal


@dataclass
class Run:
    """One run of one checkout."""

    tree: Path
    name: str
    overrides: list[str]
    output: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.output / self.name

    def start(self) -> Process:
        command = [sys.executable, "train.py", f"run_name={self.name}"]
        command += [f"output_dir={self.output}"]
        # With the checkout on PYTHONPATH, all processes of a run import its code.
        beside = {"PYTHONPATH": f"{Path(__file__).parent}:{self.tree}", "OMP_NUM_THREADS": "1"}
        beside |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        beside |= {"OFFBYONE_CACHE": str(self.output / "cache")}
        command += [*EVERY, *(o.replace("OUTPUT", str(self.output)) for o in self.overrides)]
        return begin(command, self.tree, beside | self.environment)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return _rows(self.folder / "metrics.jsonl")

    def records(self) -> Iterator[Record]:
        """Yield the location and content of everything that must be equal."""
        for pattern in ("metrics.jsonl", "rollouts/*.jsonl", "evaluations/*.jsonl"):
            for path in sorted(self.folder.glob(pattern)):
                for number, row in enumerate(_rows(path), 1):
                    yield f"{path.relative_to(self.folder)}:{number}", row
        log = self.folder / "logs" / "inference.log"
        pushes = log.read_text().splitlines() if log.exists() else []
        for line in pushes:
            if line.startswith("version "):
                version, _, mark = line.partition(" has fingerprint ")
                yield f"push of {version}", {"fingerprint": mark}
        for step, marks in self.checkpoints.items():
            yield f"checkpoints/{step}", marks

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Return the fingerprints of the files with weights, by checkpoint."""
        return {
            folder.name: fingerprints(folder / "hf")
            for folder in sorted((self.folder / "checkpoints").glob("step_*"))
        }

    def idle(self) -> str:
        """Return why the comparison is useless, or an empty string if the run learned."""
        rows = [row for row in self.metrics if "train/grad_norm" in row]
        marks = [json.dumps(found) for found in self.checkpoints.values() if found]
        if not rows or not all((row["train/grad_norm"] or 0) > 0 for row in rows):
            return "a step without a gradient"
        if "loss=sft" not in self.overrides and len({row["train/reward"] for row in rows}) < 3:
            return "rewards that hardly vary"
        return "" if len(marks) == 2 and marks[0] != marks[1] else "weights that do not change"


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_time(key: str) -> bool:
    """Return whether a key is in TIMES."""
    return any(key == time or (time.endswith("/") and key.startswith(time)) for time in TIMES)


def first_difference(before: Iterable[Record], after: Iterable[Record]) -> str:
    """Return the first difference, or an empty string."""
    for one, other in zip_longest(before, after):
        if one is None or other is None or one[0] != other[0]:
            return f"{one and one[0]} before, {other and other[0]} after"
        (where, left), (_, right) = one, other
        for key in {**left, **right}:
            # Compare text, so that -0.0 differs from 0.0, and a missing key from null.
            texts = [json.dumps(row[key]) if key in row else "(absent)" for row in (left, right)]
            if not is_time(key) and texts[0] != texts[1]:
                return f"{where} {key}: {texts[0]} before, {texts[1]} after"
    return ""


def rewriting_model(shipped: Path, folder: Path) -> None:
    """Write tiny-wiki with a chat template that changes earlier turns, so that rollouts fork."""
    shutil.copytree(shipped, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    turn = "message.role + '\\n' + content"
    earlier = f"{turn} + ('(earlier)' if message.role == 'assistant' else '')"
    assert turn in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace(turn, earlier)
    path.write_text(json.dumps(config))


def compare(name: str, overrides: list[str], trees: list[Path], output: Path) -> str:
    """Run one composition of both trees; return the problem, or an empty string."""
    began = time.monotonic()
    runs = [
        Run(tree, name, overrides, output / side)
        for side, tree in zip(("before", "after"), trees, strict=True)
    ]
    for run in runs:
        rewriting_model(run.tree / "models" / "tiny-wiki", run.output / "rewriting")
    processes = [run.start() for run in runs]
    try:
        screens = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # train.py ends what it started
    for run, process, screen in zip(runs, processes, screens, strict=True):
        if process.returncode:
            return f"{run.tree} ended with status {process.returncode}:\n{screen[-3000:]}"
    problem = first_difference(runs[0].records(), runs[1].records())
    if not problem and (why := runs[0].idle()):
        problem = f"equal, but the run has {why}, so the comparison is useless"
    if not problem:
        compared = sum(1 for _ in runs[0].records())
        marks = next(iter(list(runs[0].checkpoints.values())[-1].values()))
        seconds = time.monotonic() - began
        told = f"equal  {name:16} {compared} records, weights {marks}, {seconds:.0f} s"
        print(told, flush=True)  # noqa: T201
    return problem


def main() -> int:
    """Compare all compositions; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default=",".join(COMPOSITIONS))
    parser.add_argument("--output", type=Path, help="kept; otherwise a temporary folder")
    chosen = parser.parse_args()
    trees = [chosen.before.resolve(), chosen.after.resolve()]
    with tempfile.TemporaryDirectory(prefix="equal-runs-") as temporary:
        output = (chosen.output or Path(temporary)).resolve()
        for name in chosen.only.split(","):
            if problem := compare(name, COMPOSITIONS[name], trees, output):
                print(f"DIFFER {name}: {problem}", flush=True)  # noqa: T201
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
