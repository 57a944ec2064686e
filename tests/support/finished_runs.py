"""Write folders of finished runs without training: metrics, evaluations, configuration."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rl.runtime.folder import RunFolder

NUM_QUESTIONS = 16


def made_run(
    folder: Path,
    *overrides: str,
    seed: int = 0,
    steps: int = 20,
    max_steps: int | None = None,
    evaluations: Mapping[int, Sequence[float]] | None = None,
    reward: float | None = None,
    words: str = "reverse",
    commit: str = "",
    **settings: Any,
) -> Path:
    """Write one run. `evaluations` has question scores by version; `reward` is for all steps."""
    run = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = evaluations or {}
    with run.metrics.open("w") as file:
        for step in range(steps + 1):
            row: dict[str, Any] = {"step": step, "time": 1.0}
            if step < steps:
                row |= {"train/reward": 0.3 if reward is None else reward, "train/tokens": 100.0}
                row |= {"train/entropy": 1 / (step + 1), "train/grad_norm": 0.5}
                row |= {"time/step": 3.0, "time/update": 2.0, "time/wait": 0.5}
            if step in evaluations:
                row["eval/reward"] = float(np.mean(evaluations[step]))
            if len(row) > 2:
                file.write(json.dumps(row) + "\n")
    for version, scores in evaluations.items():
        write_evaluation(run, version, scores, words)
    config = {"seed": seed, "run_name": folder.name, "max_steps": max_steps or steps}
    config |= {"choice": list(overrides), **settings}
    run.config.write_text(yaml.safe_dump(config))
    record = {"overrides": [*overrides, f"seed={seed}"], "command": ["python", "train.py"]}
    record |= {"commit": commit} if commit else {}
    run.overrides.write_text(yaml.safe_dump(record | {"started_in": "/", "run_name": folder.name}))
    run.versions.write_text(json.dumps({"torch": "2.13.0", "offbyone": "0.1.0"}))
    return folder


def write_evaluation(
    run: RunFolder, version: int, scores: Sequence[float], words: str = "reverse"
) -> None:
    """Write two rollouts per question, whose mean is its score."""
    with run.evaluation_of(version).open("w") as file:
        for example, score in enumerate(scores):
            asked = {"role": "user", "content": f"{words} {example}"}
            line = {"example": example, "env": words, "messages": [asked]}
            for sign in (-1, 1):
                spread = min(0.1, score, 1 - score) * sign
                file.write(json.dumps({**line, "reward": float(score + spread)}) + "\n")


def made_arm(
    root: Path,
    choice: str,
    *,
    gain: float = 0.0,
    seeds: int = 5,
    noise: float = 0.02,
    num_questions: int = NUM_QUESTIONS,
    **keywords: Any,
) -> list[Path]:
    """Write the runs of one arm: each question scores 0.5 + `gain`, plus noise."""
    rng = np.random.default_rng(len(choice) + sum(map(ord, choice)))
    folders = []
    for seed in range(seeds):
        last = 0.5 + gain + rng.normal(0, noise) + rng.normal(0, noise, num_questions)
        evaluations = {0: [0.3] * num_questions, 10: (last + 0.3) / 2, 20: last}
        folder = root / f"{choice.replace('=', '-')}-s{seed}"
        folders.append(made_run(folder, choice, seed=seed, evaluations=evaluations, **keywords))
    return folders


def made_sweep(folder: Path, runs: Sequence[Path], question: str = "") -> Path:
    """Write the folder of a sweep with these runs."""
    (folder / "jobs").mkdir(parents=True)
    for index, run in enumerate(runs):
        overrides = yaml.safe_load(RunFolder(run).overrides.read_text())["overrides"]
        job = {"overrides": overrides, "folder": str(run), "error": None}
        (folder / "jobs" / f"{index:05d}.json").write_text(json.dumps(job))
    if question:
        sweep = {"question": question, "command": "python train.py --multirun hydra.sweep.dir=x"}
        (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder
