"""Whole runs with the real trainer on the device, beside equal runs on the CPU.

The scripted engine of the tests answers instead of vLLM. Its answers do not depend on the weights,
so that both runs train on the same rollouts, and every metric must be about equal. This stage needs
the packages of the project except vLLM.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.support.equal_runs import COMPOSITIONS, SYNC, Run, is_time

ROOT = Path(__file__).parents[2]
ALIKE = {  # ways of computing the same run
    **{stage: [f"deepspeed={stage}"] for stage in ("zero1", "zero2", "zero3")},
    "offload": ["deepspeed=zero3_offload_optimizer"],
    "plain-rows": ["trainer.share_prefixes=false"],
    "checkpointed": ["trainer.gradient_checkpointing=true"],
    "compiled": ["trainer.compile=true"],
}
RUNS = {
    **{name: COMPOSITIONS[name] for name in ("cispo", "grpo-kl", "critic", "turns", "sft")},
    "two-updates": COMPOSITIONS["ppo-two-updates"],
    "lora-merged": [*COMPOSITIONS["lora-merged"], "sync=shm"],
    "turns-lora": COMPOSITIONS["turns-lora"],
    "moe": [*SYNC, "model=tiny-moe"],
    "moe-lora": [*SYNC, "model=tiny-moe", "adapter=lora", "sync=shm"],
    "muon": [*SYNC, "optim=muon"],
    **{loss: [*SYNC, f"loss={loss}"] for loss in ("dppo", "gspo", "sapo", "top_entropy")},
}
IN_BFLOAT16 = ("cispo", "turns-lora", "lora-merged", "moe", "zero2", "zero3")
FEW = ("cispo", "zero3")


def runs(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield for each run how far its metrics are from those of the run on the CPU.

    In bfloat16 the rounding differs, so that later steps of the two runs have other weights.
    """
    output = Path(os.environ.get("OUT", "outputs/first-hour"), "runs").resolve()
    output.mkdir(parents=True, exist_ok=True)
    names = [(name, "float32") for name in (FEW if tiny else (*RUNS, *ALIKE))]
    names += [(name, "bfloat16") for name in IN_BFLOAT16 if not tiny or name in FEW]
    on_gpu, started = device.type == "cuda", {}
    with ThreadPoolExecutor(12 if on_gpu else 2) as pool:
        for name, width in names:
            base = "cispo" if name in ALIKE else name
            for where, run, gpu in (("device", name, on_gpu), ("cpu", base, False)):
                made = [*RUNS[base], *ALIKE.get(run, []), f"model.dtype={width}"]
                folder = output / where / f"{run}-{width}"
                if folder not in started:  # several ways are compared with the same run
                    started[folder] = pool.submit(train, folder, made, gpu=gpu)
        for name, width in names:
            base = "cispo" if name in ALIKE else name
            found, screen = started[output / "device" / f"{name}-{width}"].result()
            expected, on_cpu = started[output / "cpu" / f"{base}-{width}"].result()
            line = {"run": name, "dtype": width}
            if screen or on_cpu:
                yield {**line, "failed" if screen else "failed on the CPU": screen or on_cpu}
                continue
            pairs = [gaps(*both) for both in zip(found, expected, strict=True)]
            yield {**line, "steps": len(found), "step 1": largest(pairs[:1]), "all": largest(pairs)}


def gaps(ours: dict[str, Any], expected: dict[str, Any]) -> list[tuple[float, str]]:
    """Return the relative difference of each metric of training, with its name."""
    keys = sorted(key for key in {**ours, **expected} if key.startswith("train/"))
    return [(difference(ours.get(key), expected.get(key)), key) for key in keys if not is_time(key)]


def difference(one: Any, other: Any) -> float:
    """Return |one - other| relative to the larger one, at least 0.01; inf if one is no number."""
    if one is None or other is None:
        return 0.0 if one == other else float("inf")
    return abs(one - other) / max(abs(one), abs(other), 0.01)


def largest(steps: list[list[tuple[float, str]]]) -> str:
    """Return the largest difference, and the metric that has it."""
    gap, key = max(gap for step in steps for gap in step)  # a row of an evaluation has none
    return f"{gap:.1e} {key}"


def train(folder: Path, overrides: list[str], *, gpu: bool) -> tuple[list[dict[str, Any]], str]:
    """Run train.py unless it was done; return its metrics, and its screen if it failed."""
    output, name = folder.parent, folder.name
    paths = [ROOT, ROOT / "tests" / "support", *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths))}  # the project may not be installed
    own["OFFBYONE_CACHE"] = str(output / "cache" / name)
    if gpu:
        own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    # Do not compile layers unless an override asks for it.
    run = Run(ROOT, name, ["trainer.compile=false", *overrides], output, own)
    done = output / f"{name}.ok"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        process = run.start()
        screen = process.communicate()[0]
        if process.returncode:
            return [], screen[-3000:]
        done.touch()
    return run.metrics, ""
