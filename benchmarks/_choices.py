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
KEYS = {
    "updates_per_batch": ["1", "2"],
    "entropy_bonus": ["0", "0.01"],
    "group_size": ["1", "16"],
    "reward.normalise_each": ["false", "true"],
    "reward.length_penalty": ["0", "0.1"],
}
# Groups that keep their default in a trained composition, and choices that a scripted server or an
# untrained model cannot have.
NOT_TRAINED = ("model", "strategy", "client", "evaluation", "group_size", "reward.length_penalty")
NO_SERVER = {"reference": ["endpoint"], "sync": ["adapter", "gloo", "ipc", "nccl"]}
NO_MIXTURE = {"reference": ["per_env"]}  # per_env needs env=mixture, and env is in ELSEWHERE
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
        self.groups = self._files | KEYS
        others = {name: files for name, files in self._files.items() if name != "model"}
        self._nodes: dict[str, dict[str, Any]] = {name: {} for name in self._files}
        self._base = composed("run_name=composition", "output_dir=nowhere")
        self._facts: dict[str, dict[str, Any]] = {}
        # Composing is slow, so compose the i-th choices of all groups together.
        for i in range(max(map(len, others.values()))):
            self._compose({name: files[i] for name, files in others.items() if i < len(files)})
        for file in self._files["model"]:
            self._compose({"model": file, "adapter": "none"})

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
        for key in KEYS.keys() & row.keys():
            group, _, last = key.partition(".")
            value = json.loads(row[key])
            if not last:
                config[key] = value
            elif _exists(config, key):
                config[group] = {**config[group], last: value}
        return config

    def overrides(self, row: Assignment) -> list[str]:
        """Return the overrides of train.py that choose a row."""
        config = self.config(row)
        keys = [key for key in row if key in self._files or _exists(config, key)]
        return [f"{key}={row[key]}" for key in keys]

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
        for name, choices in NO_SERVER.items():
            groups[name] = [choice for choice in groups[name] if choice not in choices]
        return Covering(groups, self.problems).fill()


def _exists(config: Mapping[str, Any], key: str) -> bool:
    group, _, last = key.partition(".")
    return not last or last in config[group]


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
