"""Read constants that the chosen classes state about themselves; subclasses inherit them.

class Imitator:        uses_vllm: ClassVar[bool] = False

Rules use such facts and never the name of a target, so that they hold for a user's classes, too.
What the dry call finds out about functions is in rl/config/learned.py.
"""

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rl.config.signatures import Definition, Module, bases, definition_of

Config = Mapping[str, Any]


def is_imitator(sampler: str) -> bool:
    """Whether no policy samples the text of a sampler, so that no vLLM is started."""
    return not fact(sampler, "uses_vllm", True)


def spans_hosts(cluster: Config) -> bool:
    """Whether processes of a run may be on different machines, so that no socket is a file."""
    return fact(cluster["_target_"], "spans_hosts", False)


def is_external(inference: Config | None) -> bool:
    """Whether the user has started the vLLMs, so that they may be on any machine."""
    return bool(inference) and fact(inference["_target_"], "is_external", False)


def needs_reference(config: Config) -> bool:
    """Whether a reference is loaded: a penalty reads it, or it is not the policy as it started.

    The rules refuse every other reference that the loss does not read, and a loss that learns
    from the policy itself (rl/config/algorithm_rules.py).
    """
    node = config["reference"]
    kind = node["_target_"]
    is_teacher = not fact(kind, "is_policy", False) or node.get("sees_hint", False)
    return config["kl"]["beta"] > 0 or (fact(kind, "has_logprobs", True) and is_teacher)


def references(config: Config) -> dict[str, Config]:
    """Return the references by dotted path: one, or one for each environment of a mixture."""
    if (node := config.get("reference")) is None:  # an evaluation trains nothing
        return {}
    if not isinstance(teachers := node.get("teachers"), Mapping):
        return {"reference": node}
    return {f"reference.teachers.{name}": teacher for name, teacher in teachers.items()}


def sees_hint(config: Config, env: str) -> bool:
    """Whether the reference of an environment's rows sees hints, and is read."""
    nodes = references(config)
    node = nodes.get("reference", nodes.get(f"reference.teachers.{env}", {}))
    return bool(node.get("sees_hint")) and needs_reference(config)


def fact(target: str, name: str, default: Any) -> Any:
    """Return a constant of a class, its bases included, or of the file of a function."""
    value = _constant(*definition_of(target), name)
    return default if value is None else value


def _constant(module: Module, definition: Definition, name: str) -> Any:
    is_class = isinstance(definition, ast.ClassDef)
    for statement in definition.body if is_class else module.statements():
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
            ) if target == name:
                with suppress(ValueError):  # computed at run time
                    return ast.literal_eval(value)
    inherited = (_constant(*base, name) for base in (bases(module, definition) if is_class else ()))
    return next((value for value in inherited if value is not None), None)
