"""Whole runs with the real trainer on the device, beside equal runs on the CPU.

The scripted engine of the tests answers instead of vLLM. Its answers do not depend on the weights,
so that both runs train on the same rollouts, and every metric must be about equal. These stages
need the packages of the project except vLLM.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.first_hour.update import config
from tests.support.equal_runs import COMPOSITIONS, EVERY, is_time

ROOT = Path(__file__).parents[2]
SYNC = ["sampler=sync", "sampler.rollout_timeout=120"]
ENGINE = "inference._target_=tests.support.scripted_vllm.ScriptedVLLM"
ONE_RANK = {
    **{name: COMPOSITIONS[name] for name in ("cispo", "grpo-kl", "critic", "turns", "sft")},
    "two-updates": COMPOSITIONS["ppo-two-updates"],
    "lora-merged": [*COMPOSITIONS["lora-merged"], "sync=shm"],
    "turns-lora": COMPOSITIONS["turns-lora"],
    **{stage: [*SYNC, f"deepspeed={stage}"] for stage in ("zero1", "zero2", "zero3")},
    "offload": [*SYNC, "deepspeed=zero3_offload_optimizer"],
    "plain-rows": [*SYNC, "trainer.share_prefixes=false"],
    "checkpointed": [*SYNC, "trainer.gradient_checkpointing=true"],
    "compiled": [*SYNC, "trainer.compile=true"],
    "moe": [*SYNC, "model=tiny-moe"],
    "moe-lora": [*SYNC, "model=tiny-moe", "adapter=lora", "sync=shm"],
    "muon": [*SYNC, "optim=muon"],
}
COMPARED = ("train/", "loss/", "kl/", "mismatch/", "critic/")
FEW = ("cispo", "turns-lora")


def runs(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield for each composition the largest difference of a metric from that of the CPU's run."""
    names = FEW if tiny else ONE_RANK
    output = Path(os.environ.get("OUT", "outputs/first-hour"), "runs")
    output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2 if device.type == "cpu" else 9) as pool:
        yield from pool.map(lambda name: _compared(name, output.resolve(), device), names)


def _compared(name: str, output: Path, device: torch.device) -> dict[str, Any]:
    line: dict[str, Any] = {"run": name}
    found = []
    for side, visible in (("device", device.type == "cuda"), ("cpu", False)):
        began = time.monotonic()
        metrics, screen = train(output / side, name, ONE_RANK[name], gpu=visible)
        line[f"{side}_s"] = round(time.monotonic() - began)
        if screen:
            return {**line, "failed": side, "screen": screen}
        found.append(metrics)
    worst, where = 0.0, ""
    for number, (ours, expected) in enumerate(zip(*found, strict=True), 1):
        for key in sorted(ours.keys() | expected.keys()):
            if key.startswith(COMPARED) and not is_time(key):
                gap = difference(ours.get(key), expected.get(key))
                worst, where = max((worst, where), (gap, f"{key} of step {number}"))
    return {**line, "steps": len(found[0]), "difference": f"{worst:.1e}", "of": where}


def difference(one: Any, other: Any) -> float:
    """Return |one - other| relative to the larger one, at least 0.01; inf if one is no number."""
    if one is None or other is None:
        return 0.0 if one == other else float("inf")
    return abs(one - other) / max(abs(one), abs(other), 0.01)


def train(
    output: Path, name: str, overrides: list[str], *, gpu: bool
) -> tuple[list[dict[str, Any]], str]:
    """Run train.py unless it was done; return its metrics, and its screen if it failed."""
    folder, done = output / name, output / f"{name}.ok"
    command = [sys.executable, "train.py", f"run_name={name}", f"output_dir={output}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # it may not be installed
    own = {"HF_HUB_OFFLINE": "1", "OFFBYONE_CACHE": str(output / "cache" / name)}
    own["PYTHONPATH"] = os.pathsep.join(paths)
    own |= {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    settings = [given for given in EVERY if not given.startswith("inference._target_")]
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        ran = subprocess.run(
            [*command, *settings, ENGINE, *overrides],
            cwd=ROOT,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            return [], (ran.stdout + ran.stderr)[-3000:]
        done.touch()
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())), ""


def large(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield times and peak memory of runs with a network of 0.6B drawn from a configuration."""
    with tempfile.TemporaryDirectory() as name:
        model, output = Path(name, "model"), Path(name)
        draw(model, tiny)
        for run, adapter in (("full", ["adapter=none"]), ("lora", ["adapter=lora", "sync=shm"])):
            made = [*SYNC, *adapter, "model=tiny-wiki", f"model.path={model}", "max_steps=3"]
            rows, screen = train(output, run, made, gpu=device.type == "cuda")
            line: dict[str, Any] = {"run": run, "steps": len(rows)}
            if screen:
                yield {**line, "screen": screen}
            else:
                times = {key: value for key, value in rows[-1].items() if is_time(key)}
                yield line | {key: round(float(value), 3) for key, value in times.items()}


def draw(folder: Path, tiny: bool) -> None:
    """Write a network of 0.6B with the tokenizer of tiny-wiki."""
    model = AutoModelForCausalLM.from_config(config("0.6b", tiny), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in (ROOT / "models" / "tiny-wiki").glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
