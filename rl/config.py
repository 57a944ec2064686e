"""A run's configuration: what it holds, whether it is right, and how its nodes become callables.

The callable's signature is the schema. A node is a mapping with `_target_`, which names one of our
callables; its other keys are that callable's keyword-only parameters (rl/signatures.py):

    loss:
      _target_: losses.cispo.cispo        def cispo(tokens, *, clip_low: float, clip_high: float)
      clip_low: 0.0
      clip_high: 5.0                      build(node) -> partial(cispo, clip_low=0.0, clip_high=5.0)
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from rl.annotations import Converter, Misfit, Node
from rl.free_form import free_form_problems
from rl.rules import rule_problems
from rl.signatures import Knob, did_you_mean, read

MISSING = "???"


class ConfigError(ValueError):
    """The configuration cannot work; each problem is one sentence that says what to do."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Run:
    """The top level of conf/train.yaml, resolved. Values are explained there."""

    seed: int
    max_steps: int
    batch_size: int  # rollouts per optimizer step
    group_size: int  # rollouts per example
    max_seq_len: int
    updates_per_batch: int
    entropy_bonus: float
    model: Node
    adapter: Node
    env: Node
    sampler: Node
    client: Node
    buffer: Node
    reward: Node
    truncation: Node
    advantage: Node
    aggregation: Node
    reference: Node
    kl: Node
    correction: Node
    loss: Node
    optim: Node
    deepspeed: dict[str, Any]
    inference: Node
    sync: Node
    logger: Node
    evaluation: Node
    trainer: Node
    output_dir: str
    run_name: str
    resume: bool

    @property
    def folder(self) -> Path:
        """Where everything of this run lies."""
        return Path(self.output_dir) / self.run_name

    @property
    def groups_per_step(self) -> int:
        """Examples per batch."""
        return self.batch_size // self.group_size

    @classmethod
    def load(cls, path: Path) -> "Run":
        """The run that `save` wrote there."""
        return cls(**yaml.safe_load(path.read_text()))

    def save(self, path: Path) -> None:
        """Write the resolved configuration as YAML."""
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True))


def build(node: Mapping[str, Any]) -> partial[Any]:
    """The node's callable with its knobs; the caller passes what the code supplies.

    Nested nodes are built first; where they name a class, the knob gets an instance of it.
    """
    target = str(node["_target_"])
    signature = read(target)
    knobs = {
        key: _converted(value, signature.knobs.get(key), f"{target}.{key}")
        for key, value in node.items()
        if key != "_target_"
    }
    module, _, name = target.rpartition(".")
    return partial(getattr(import_module(module), name), **knobs)


def _converted(value: Any, knob: Knob | None, path: str) -> Any:
    if knob is None:
        raise ConfigError([f"{path} is not a knob"])
    try:
        return Converter(knob.module, _built).convert(value, knob.annotation, path)
    except Misfit as misfit:
        raise ConfigError([f"{path} {misfit}"]) from None


def _built(node: Node, _path: str) -> Any:
    made = build(node)
    return made() if read(node["_target_"]).is_class else made


def check(
    config: Mapping[str, Any],
    schema: str = f"{__name__}.Run",
    rules: Callable[[Mapping[str, Any]], list[str]] = rule_problems,
) -> None:
    """Raise ConfigError with everything that is wrong with a resolved configuration.

    Keys, types and targets first; what the keys mean together (rl/rules.py) once those are right.

    Args:
        config: its top level.
        schema: the class that says which keys there are.
        rules: what they mean together.

    """
    problems = list(_node_problems({"_target_": schema, **config}, ""))
    problems += free_form_problems(config)
    if not problems:
        problems = rules(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # one path may be looked at twice


def _node_problems(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """What is wrong with a node and the nodes in it; the whole configuration has the path ""."""
    target = node["_target_"]
    try:
        signature = read(str(target))
    except LookupError as error:
        yield f"{path}._target_ is {target}, but {error.args[0]}"
        return
    prefix, owner = (f"{path}.", target) if path else ("", "a run")
    missing = [k for k, knob in signature.knobs.items() if knob.required and k not in node]
    for key in node:
        if key == "_target_" or key in signature.knobs:
            continue
        hint = did_you_mean(str(key), signature.knobs)
        missing = [name for name in missing if not hint.endswith(f" {name}?")]
        if key in signature.positional:
            hint = ": the code supplies it, so leave it out"
        known = f": it has {', '.join(signature.knobs) or 'none'}"
        yield f"{prefix}{key} is no key of {owner}{hint or known}"
    for key in missing:
        kind = signature.knobs[key].annotation
        if not path and isinstance(kind, ast.Name) and kind.id == "Node":
            yield f"{key} is missing: choose one with {key}=<name of a file in conf/{key}>"
        else:
            yield f"{prefix}{key} is missing: add it to the YAML that sets {path or 'the run'}"
    for key, knob in signature.knobs.items():
        if key in node:
            yield from _value_problems(node[key], knob, f"{prefix}{key}")


def _value_problems(value: Any, knob: Knob, path: str) -> Iterator[str]:
    """What is wrong with one value, nested nodes included."""
    if value == MISSING:
        yield f"{path} has no value yet: give it one, {path}=..."
        return
    found: list[str] = []

    def descend(node: Node, where: str) -> Node:
        found.extend(_node_problems(node, where))
        return node

    try:
        Converter(knob.module, descend).convert(value, knob.annotation, path)
    except Misfit as misfit:
        found.append(f"{path} {misfit}")
    yield from found
