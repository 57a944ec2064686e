"""Compose every choice of every config group, and ask the check which combinations it allows."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from benchmarks._covering import Assignment, Covering, merged
from rl.config.check import check, check_learned
from rl.config.learned import Learned
from rl.config.schema import ConfigError
from rl.dry_call.learn import learn
from tests.support.composing import CONF, composed

STEPS = 3
# Overrides that a choice needs before it can be composed.
COMPANIONS = {
    "reference=model": ["reference.path=some/teacher"],
    "reference=endpoint": ["reference.url=http://localhost:8000/v1", "reference.model=teacher"],
    "sampler=transcripts": ["sampler.path=text"],
    "model=hf": ["model.path=some/model"],
    "client=messages": ["client.url=http://localhost:8000/v1", "client.model=name"],
    "evaluation=default": ["evaluation.temperature=1.0"],
}
# The group that each fact of a dry call follows from, by the fact's prefix.
_SAME = ("loss", "correction", "advantage", "batch_credit", "aggregation", "truncation")
_LEARNED_FROM = {"kl": "divergence_", **{group: f"{group}_" for group in _SAME}}
# Groups left out, because no rule connects their choices to another group.
ELSEWHERE = ("env", "inference", "logger", "record", "experiment", "reward", "cluster", "until")
# Keys that are varied like groups. A dotted key is set only where its node has that key.
KEYS: dict[str, dict[str, Any]] = {
    "updates_per_batch": {"1": 1, "2": 2},
    "entropy_bonus": {"0": 0.0, "0.01": 0.01},
    "group_size": {"1": 1, "16": 16},
    "reward.normalise_each": {"false": False, "true": True},
    "reward.length_penalty": {"0": 0.0, "0.1": 0.1},
}
# Groups and choices that a training step without a server cannot exercise.
NOT_TRAINED = ("model", "strategy", "client", "evaluation", "group_size", "reward.length_penalty")
NO_SERVER = {"reference": "endpoint"}
NO_MIXTURE = {"reference": ["per_env"]}  # per_env needs env=mixture, and env is in ELSEWHERE
ENVIRONMENTS = ("reverse-text", "arithmetic")  # their episodes fit the tiny policy
SMALL = {
    **{"batch_size": 16, "group_size": 4, "max_steps": STEPS, "optim.warmup_steps": 0},
    **{"trainer.num_threads": 1, "env.num_train": 300, "env.num_eval": 10},
    **{"model.warm_start": None, "model.dtype": "float32", "reference.dtype": "float32"},
}
HEAD = """\
{:,} pairs of choices: {:,} are refused, {:,} cannot occur. The others occur in {} compositions.

| combination | message |
|---|---|"""


class Compositions:
    """Compose every config node once, then assemble configurations from the nodes."""

    def __init__(self) -> None:
        folders = [p for p in sorted(CONF.iterdir()) if p.is_dir() and p.name not in ELSEWHERE]
        self._files = {
            p.name: sorted({file.stem for file in p.glob("*.yaml")} - {*NO_MIXTURE.get(p.name, ())})
            for p in folders
        }
        self.groups = self._files | {key: list(values) for key, values in KEYS.items()}
        others = {name: files for name, files in self._files.items() if name != "model"}
        self._nodes: dict[str, dict[str, Any]] = {name: {} for name in self._files}
        self._base = composed("run_name=composition", "output_dir=nowhere")
        self._facts: dict[str, dict[str, Any]] = {}
        # Composing is slow, so compose the i-th choices of all groups together.
        for i in range(max(map(len, others.values()))):
            self._compose({name: files[i] for name, files in others.items() if i < len(files)})
        for file in self._files["model"]:
            self._compose({"model": file, "adapter": "none"})
        # An untrained policy answers nothing exactly, so a graded reward must tell answers apart.
        graded = {"reverse-text": ["env.reward_weights.similarity=1"]}
        self._env = {
            name: composed(f"env={name}", "model=tiny", *graded.get(name, []))["env"]
            for name in ENVIRONMENTS
        }

    def _compose(self, choices: Mapping[str, str]) -> None:
        lines = [f"{group}={choice}" for group, choice in choices.items()]
        if "loss" in choices and "reference" not in choices:
            lines.append("reference=initial")
        companions = [extra for line in lines for extra in COMPANIONS.get(line, [])]
        config = composed(*lines, *companions)
        for group, choice in choices.items():
            self._nodes[group][choice] = config[group]

    def config(self, row: Assignment) -> dict[str, Any]:
        """Return the configuration of a row; groups that the row omits keep their default."""
        config = {**self._base, **{g: self._nodes[g][row[g]] for g in self._nodes if g in row}}
        values = {key: KEYS[key][row[key]] for key in KEYS if key in row}
        return _with(config, values)

    def trained(self, row: Assignment, environment: str) -> dict[str, Any]:
        """Return the configuration of a row, made small enough to train on a CPU."""
        return _with({**self.config(row), "env": self._env[environment]}, SMALL)

    def problems(self, row: Assignment) -> list[str]:
        """Return the problems that the check of a run finds in a row."""
        config, problems = self.config(row), list[str]()
        for look in (lambda: check(config), lambda: check_learned(config, self._learned(config))):
            try:
                look()
            except ConfigError as error:
                problems += error.problems
        # A message names callables. In the table, each is the choice of the row that has it.
        for group, choice in row.items():
            if group in self._files and "_target_" in config[group]:
                name = rf"\b{re.escape(config[group]['_target_'])}\b"
                problems = [re.sub(name, f"{group}={choice}", problem) for problem in problems]
        return problems

    def _learned(self, config: Mapping[str, Any]) -> Learned:
        """Return what a dry call learns, with one call per choice instead of one per row."""
        facts: dict[str, Any] = {}
        for group, prefix in _LEARNED_FROM.items():
            alone = {group: config[group], "updates_per_batch": config["updates_per_batch"]}
            key = json.dumps(alone, sort_keys=True, default=str)
            if key not in self._facts:
                self._facts[key] = asdict(learn({**self._base, **alone}))
            facts |= {k: v for k, v in self._facts[key].items() if k.startswith(prefix)}
        return Learned(**facts)

    @cached_property
    def whole(self) -> Covering:
        """Return the covering of all groups, which `table` describes."""
        first = Covering(self.groups, self.problems).fill()
        # Fill again with all conflicts known, so that the rows depend on the table alone.
        return Covering(self.groups, self.problems, first.conflicts).fill()

    @cached_property
    def trainable(self) -> Covering:
        """Return the covering of the groups that a training step uses."""
        groups = {name: c for name, c in self.groups.items() if name not in NOT_TRAINED}
        for name, choice in NO_SERVER.items():
            groups[name] = [other for other in groups[name] if other != choice]
        return Covering(groups, self.problems).fill()


def _with(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with these dotted keys set, where they exist."""
    config = dict(config)
    for key, value in values.items():
        group, _, last = key.partition(".")
        if not last:
            config[group] = value
        elif last in config[group]:
            config[group] = {**config[group], last: value}
    return config


def table(covering: Covering) -> str:
    """Return the number of refused pairs, and a line for each message with its combinations.

    A message is that of the first combination of its line. The others get the same message.
    """
    rows = []
    for choices, message in merged(covering.conflicts):
        named = [f"`{group}={','.join(names)}`" for group, names in choices.items()]
        rows.append(f"| {' and '.join(named)} | {message} |")
    counts = (len(covering.pairs()), len(covering.refused()), len(covering.impossible))
    return "\n".join([HEAD.format(*counts, len(covering.rows)), *rows, ""])
