"""Does every pair of choices from any two groups train, or is it refused with a sentence?

    python -m benchmarks.compositions        one JSON line a run, then writes docs/compositions.md

A covering set of runs (benchmarks/_covering.py) is trained for three steps each, on a tiny policy
that was taught its environment here, through the very learner of a run: DeepSpeed engine,
objective, plan, buffer, credit. Only vLLM is left out: the policy is sampled in this process.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._composing import CONF, compose
from benchmarks._covering import Assignment, Covering, cover
from benchmarks._playing import Playground
from rl.config.rules import rule_problems
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.ranks import Ranks
from rl.run.folder import RunFolder
from rl.weights.fingerprint import fingerprint

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "compositions.md"
STEPS = 3
SMALL = (
    *("batch_size=16", "group_size=4", f"max_steps={STEPS}", "optim.warmup_steps=0"),
    *("model.warm_start=null", "model.dtype=float32", "trainer.num_threads=1"),
    *("env.num_train=300", "env.num_eval=10"),
)
# What a choice cannot be composed without.
COMPANIONS = {
    "reference=model": ["reference.path=teacher"],
    "sampler=transcripts": ["sampler.path=text"],
}
# They decide where a run starts, is logged, evaluated and served: no part of a training step.
ELSEWHERE = ("model", "client", "inference", "logger", "evaluation", "experiment")
# Needs another server; the environments of one turn that are short enough for the policy here stay.
PLAYED = ("reverse-text", "arithmetic")
LEFT_OUT = (
    "reference=endpoint",
    *(f"env={path.stem}" for path in CONF.glob("env/*.yaml") if path.stem not in PLAYED),
)
# Keys that are choices, though no group.
KEYS = {
    "updates_per_batch": {"1": 1, "2": 2},
    "entropy_bonus": {"0": 0.0, "0.01": 0.01},
    "reward.normalise_each": {"false": False, "true": True},
}


class Compositions:
    """Configurations by choice: every node composed once, then put together."""

    def __init__(self) -> None:
        self._base = compose([*SMALL])
        self._nodes: dict[str, dict[str, Any]] = {}
        for folder in sorted(p for p in (REPO / "conf").iterdir() if p.is_dir()):
            if folder.name in ELSEWHERE:
                continue
            for path in sorted(folder.glob("*.yaml")):
                choice = f"{folder.name}={path.stem}"
                if choice not in LEFT_OUT:
                    overrides = [choice, *COMPANIONS.get(choice, [])]
                    node = compose([*SMALL, *overrides])[folder.name]
                    self._nodes.setdefault(folder.name, {})[path.stem] = node
        self.groups = {name: list(nodes) for name, nodes in self._nodes.items()}
        self.groups |= {name: list(values) for name, values in KEYS.items()}

    def config(self, row: Assignment) -> dict[str, Any]:
        """The resolved configuration of a row."""
        config = {**self._base, "run_name": "composition"}
        for group, choice in row.items():
            if group in self._nodes:
                config[group] = self._nodes[group][choice]
        for key, values in KEYS.items():
            *parents, last = key.split(".")
            value = values[row[key]]
            if parents:
                config[parents[0]] = {**config[parents[0]], last: value}
            else:
                config[last] = value
        return config

    def problems(self, row: Assignment) -> list[str]:
        """What the rules of a run say."""
        return [p for p in rule_problems(self.config(row)) if "reference.path=teacher" not in p]

    def covering(self) -> Covering:
        """Rows that hold every pair of choices that is possible, and the others."""
        return cover(self.groups, self.problems)


def train(config: dict[str, Any], playground: Playground, ranks: Ranks) -> list[dict[str, float]]:
    """Take three steps; return the metrics of each.

    Raises:
        AssertionError: a step was skipped, or the three together changed no weight.

    """
    run = Run(**config)
    if "path" in run.reference:
        run = replace(run, reference={**run.reference, "path": str(playground.teacher(run.env))})
    if "path" in run.sampler:
        run = replace(run, sampler={**run.sampler, "path": str(playground.transcripts(run.env))})
    run_folder = RunFolder(playground.folder / "run")
    run_folder.path.mkdir(exist_ok=True)
    run_folder.set_model(playground.model(run.env))
    learner = Learner(run, run_folder, ranks)
    before = fingerprint(learner.policy.weights())
    stats = [learner.update(playground.batch(run, learner, step)) for step in range(STEPS)]
    assert not any(one["train/skipped"] for one in stats), "a step was not finite"
    assert fingerprint(learner.policy.weights()) != before, "no weight changed"
    del learner
    gc.collect()
    return stats


def page(covering: Covering, groups: dict[str, list[str]]) -> str:
    """The table of docs/compositions.md."""
    pairs = sum(len(groups[a]) * len(groups[b]) for a in groups for b in groups if a < b)
    lines = [
        "# What composes with what",
        "",
        "Written by `python -m benchmarks.compositions`; a test fails where it no longer holds.",
        f"Of {pairs:,} pairs of choices {len(covering.refused)} are refused, each with the "
        f"sentence below, before anything starts. The others occur in {len(covering.rows)} runs of "
        f"{STEPS} training steps each, on the tiny policy (DeepSpeed, one rank, fp32).",
        "",
        "| group | choices |",
        "|---|---|",
        *(f"| {name} | {', '.join(choices)} |" for name, choices in sorted(groups.items())),
        "",
        "## Refused",
        "",
        "| | with | because |",
        "|---|---|---|",
        *(
            f"| {_shown(p[0])} | {_shown(p[1])} | {why} |"
            for p, why in sorted(covering.refused.items())
        ),
        "",
        "## Trained",
        "",
        f"| {' | '.join(sorted(groups))} |",
        f"|{'---|' * len(groups)}",
        *(f"| {' | '.join(row[name] for name in sorted(groups))} |" for row in covering.rows),
        "",
    ]
    return "\n".join(lines)


def _shown(choice: tuple[str, str]) -> str:
    return f"`{choice[0]}={choice[1]}`"


def start_alone(folder: Path) -> Ranks:
    """Join a world of one rank on CPU."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)  # small matrices, and two threads that wait for each other are slower
    return Ranks.join(folder / "rendezvous", 60.0)


def main() -> None:
    """Train the covering set and write the page; exit status 1 if a run fails or a check does."""
    parser = argparse.ArgumentParser(description="Does every pair of choices train?")
    parser.add_argument(
        "--check", type=int, metavar="N", help="train every Nth run, compare the page, write none"
    )
    every: int | None = parser.parse_args().check
    compositions = Compositions()
    covering = compositions.covering()
    text = page(covering, compositions.groups)
    if every and PAGE.read_text() != text:
        sys.exit(f"{PAGE} does not hold any more: python -m benchmarks.compositions writes it anew")
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        ranks = start_alone(Path(name))
        playground = Playground(Path(name), ranks)
        for number, row in list(enumerate(covering.rows))[:: every or 1]:
            began = time.monotonic()
            line: dict[str, Any] = {"run": number, **row}
            try:
                stats = train(compositions.config(row), playground, ranks)
                line |= {"loss": [round(one["train/loss"], 4) for one in stats]}
            except Exception as error:  # noqa: BLE001 every run is tried
                line |= {"failed": f"{type(error).__name__}: {error}"}
                failed += 1
            print(json.dumps({**line, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    if failed:
        sys.exit(f"{failed} runs failed")
    if not every:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
