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
    reward: float = 0.3,
    **settings: Any,
) -> Path:
    """Write one run. `evaluations` has question scores by version; `reward` is for all steps."""
    run, evaluations = RunFolder(folder), evaluations or {}
    folder.mkdir(parents=True, exist_ok=True)
    row = {"train/reward": reward, "train/tokens": 100.0, "time/step": 3.0}
    rows = [{"step": step, **row} for step in range(steps)]
    for version, scores in evaluations.items():
        write_evaluation(run, version, scores)
        rows += [{"step": steps, "time": 1.0}] if version == steps else []
        rows[version]["eval/reward"] = float(np.mean(scores))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"seed": seed, "run_name": folder.name, "max_steps": max_steps or steps}
    run.config.write_text(yaml.safe_dump({**config, "choice": list(overrides), **settings}))
    record = {"overrides": [*overrides, f"seed={seed}"], "command": ["python", "train.py"]}
    run.overrides.write_text(yaml.safe_dump(record | {"started_in": "/", "run_name": folder.name}))
    return folder


def write_evaluation(
    run: RunFolder, version: int, scores: Sequence[float], words: str = "reverse"
) -> None:
    """Write two rollouts per question, whose mean is its score."""
    lines = []
    for example, score in enumerate(scores):
        asked = {"role": "user", "content": f"{words} {example}"}
        for sign in (-1, 1):
            reward = float(score + min(0.1, score, 1 - score) * sign)
            lines.append({"example": example, "env": words, "messages": [asked], "reward": reward})
    run.evaluation_of(version).write_text("".join(json.dumps(line) + "\n" for line in lines))


def made_arm(
    root: Path, choice: str, *, gain: float = 0.0, seeds: int = 5, **settings: Any
) -> list[Path]:
    """Write the runs of one arm: each question scores 0.5 + `gain`, plus noise."""
    rng = np.random.default_rng(len(choice) + sum(map(ord, choice)))
    folders = []
    for seed in range(seeds):
        last = 0.5 + gain + rng.normal(0, 0.02) + rng.normal(0, 0.02, NUM_QUESTIONS)
        evaluations = {0: [0.3] * NUM_QUESTIONS, 10: (last + 0.3) / 2, 20: last}
        folder = root / f"{choice.replace('=', '-')}-s{seed}"
        folders.append(made_run(folder, choice, seed=seed, evaluations=evaluations, **settings))
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
