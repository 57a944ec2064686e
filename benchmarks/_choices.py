"""Every choice of every group by name, and what the check of a run says to them together."""

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import Any

from benchmarks._composing import CONF, compose
from benchmarks._covering import Assignment, Conflict, Covering, merged
from rl.config.check import check
from rl.config.schema import ConfigError

STEPS = 3
# What a choice cannot be composed without; what refers to another group gets a value.
COMPANIONS = {
    "reference=model": ["reference.path=some/teacher"],
    "reference=endpoint": ["reference.url=http://localhost:8000/v1", "reference.model=teacher"],
    "sampler=transcripts": ["sampler.path=text"],
    "model=hf": ["model.path=some/model"],
    "client=messages": ["client.url=http://localhost:8000/v1", "client.model=name"],
    "evaluation=default": ["evaluation.temperature=1.0"],
}
# No rule joins them to another group; those of cluster and sync do not change what is learned.
ELSEWHERE = ("env", "inference", "logger", "record", "experiment", "reward", "cluster")
# Keys that are choices, though no group. Those of a node count where it has them.
KEYS: dict[str, dict[str, Any]] = {
    "updates_per_batch": {"1": 1, "2": 2},
    "entropy_bonus": {"0": 0.0, "0.01": 0.01},
    "group_size": {"1": 1, "16": 16},
    "reward.normalise_each": {"false": False, "true": True},
    "reward.length_penalty": {"0": 0.0, "0.1": 0.1},
}
# What a training step knows nothing of, or the benchmark has no server for.
NOT_TRAINED = (
    "model",
    "client",
    "evaluation",
    "group_size",
    "reward.length_penalty",
)
NO_SERVER = {"reference": "endpoint"}
NO_MIXTURE = {"reference": ["per_env"]}  # for which env is one of ELSEWHERE
ENVIRONMENTS = ("reverse-text", "arithmetic")  # short enough for the policy of the benchmark
SMALL = {
    **{"batch_size": 16, "group_size": 4, "max_steps": STEPS},
    **{"optim.warmup_steps": 0, "trainer.num_threads": 1},
    **{"model.warm_start": None, "model.dtype": "float32", "reference.dtype": "float32"},
    **{"env.num_train": 300, "env.num_eval": 10},
}


class Compositions:
    """Configurations by choice: every node composed once, then put together."""

    def __init__(self) -> None:
        folders = [p for p in sorted(CONF.iterdir()) if p.is_dir() and p.name not in ELSEWHERE]
        self._files = {
            p.name: sorted({file.stem for file in p.glob("*.yaml")} - {*NO_MIXTURE.get(p.name, ())})
            for p in folders
        }
        self.groups = self._files | {key: list(values) for key, values in KEYS.items()}
        others = {name: files for name, files in self._files.items() if name != "model"}
        self._nodes: dict[str, dict[str, Any]] = {name: {} for name in self._files}
        self._base = compose(["run_name=composition", "output_dir=nowhere"])
        # The i-th choices of all groups together, since composing is slow.
        for i in range(max(map(len, others.values()))):
            self._compose({name: files[i] for name, files in others.items() if i < len(files)})
        for file in self._files["model"]:
            self._compose({"model": file, "adapter": "none"})
        # Some of the answers of a policy that was hardly taught must be better than others.
        graded = ["env.reward_weights.similarity=1"]
        self._env = {
            name: compose(
                [f"env={name}", "model=tiny", *(graded if name == "reverse-text" else [])]
            )["env"]
            for name in ENVIRONMENTS
        }

    def _compose(self, choices: Mapping[str, str]) -> None:
        lines = [f"{group}={choice}" for group, choice in choices.items()]
        if "loss" in choices and "reference" not in choices:
            lines.append("reference=initial")
        companions = [extra for line in lines for extra in COMPANIONS.get(line, [])]
        composed = compose([*lines, *companions])
        for group, choice in choices.items():
            self._nodes[group][choice] = composed[group]

    def config(self, row: Assignment) -> dict[str, Any]:
        """The resolved configuration of a row; what it does not say is as shipped."""
        config = {**self._base, **{g: self._nodes[g][row[g]] for g in self._nodes if g in row}}
        values = {key: KEYS[key][row[key]] for key in KEYS if key in row}
        return _with(config, values)

    def trained(self, row: Assignment, environment: str) -> dict[str, Any]:
        """The same, small enough to be trained here."""
        return _with({**self.config(row), "env": self._env[environment]}, SMALL)

    def problems(self, row: Assignment) -> list[str]:
        """What the check of a run says."""
        choices = {group: choice for group, choice in row.items() if group in self._files}
        try:
            check(self.config(row), choices=choices)
        except ConfigError as error:
            return error.problems
        return []

    @cached_property
    def whole(self) -> Covering:
        """Every group: what docs/compositions.md says."""
        first = Covering(self.groups, self.problems).fill()
        # Once more with all of them known: the rows then depend on nothing but the page.
        return Covering(self.groups, self.problems, first.conflicts).fill()

    @cached_property
    def trainable(self) -> Covering:
        """The groups that a training step knows: what is trained."""
        groups = {name: c for name, c in self.groups.items() if name not in NOT_TRAINED}
        for name, choice in NO_SERVER.items():
            groups[name] = [other for other in groups[name] if other != choice]
        return Covering(groups, self.problems).fill()


def _with(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with dotted keys set, those that it has."""
    config = dict(config)
    for key, value in values.items():
        group, _, last = key.partition(".")
        if not last:
            config[group] = value
        elif last in config[group]:
            config[group] = {**config[group], last: value}
    return config


def page(covering: Covering) -> str:
    """The text of docs/compositions.md."""
    groups, pairs, refused = covering.groups, covering.pairs(), covering.refused()
    never = merged({frozenset(pair): "" for pair in covering.impossible})
    lines = [
        "# What composes with what",
        "",
        "Written by `python -m benchmarks.compositions --page`, which asks the check of a run; a "
        "test asks it again.",
        f"Of {len(pairs):,} pairs of choices {len(refused):,} are refused with a sentence before "
        f"anything starts, and {len(covering.impossible):,}",
        f"never meet. All others occur in {len(covering.rows)} runs that the check lets pass; "
        "`python -m benchmarks.compositions`",
        "trains a few steps of each. Keys that are not named are as shipped.",
        "",
        "| group | choices |",
        "|---|---|",
        *(f"| {name} | {', '.join(choices)} |" for name, choices in sorted(groups.items())),
        "",
        "## Refused",
        "",
        "The first of the combinations gets the sentence as it stands, the others with their own "
        "names.",
        "",
        "| together | the check says |",
        "|---|---|",
    ]
    for choices, sentence in merged(covering.conflicts):
        names = " and ".join(_shown(group, names) for group, names in choices.items())
        lines.append(f"| {names} | {sentence} |")
    lines += [
        "",
        "## So these never meet",
        "",
        "Neither is refused for the other, but what one of them needs excludes the other.",
        "",
        "| | never with |",
        "|---|---|",
        *(f"| {' | '.join(_shown(*item) for item in choices.items())} |" for choices, _ in never),
        "",
    ]
    return "\n".join(lines)


def _shown(group: str, choices: list[str]) -> str:
    return f"`{group}={','.join(choices)}`"


def read_page(text: str) -> dict[Conflict, str]:
    """The conflicts that a page tells of, each with the sentence of its row."""
    refused = text.split("## Refused")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", refused, re.MULTILINE)
    return {
        frozenset(zip(groups, choices, strict=True)): sentence
        for names, sentence in rows
        for groups, lists in [zip(*re.findall(r"`([\w.]+)=([^`]+)`", names), strict=True)]
        for choices in product(*(names.split(",") for names in lists))
    }
