"""Read facts about components. A fact is a constant in a class, or in the file of a function.

    class ImitationSampler:
        uses_vllm: ClassVar[bool] = False

Subclasses inherit the constants. Rules read facts, not the names of targets. So the rules
apply to a user's components, too. The dry call finds other facts (rl/config/learned.py).
"""

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rl.config.signatures import Definition, Module, bases, definition_of

Config = Mapping[str, Any]


def is_imitator(sampler: str) -> bool:
    """Return whether a sampler returns existing text, such as demonstrations, and needs no vLLM."""
    return not fact(sampler, "uses_vllm", True)


def spans_hosts(cluster: Config) -> bool:
    """Return whether a run may use several machines, which cannot share Unix sockets."""
    return fact(cluster["_target_"], "spans_hosts", False)


def is_external(inference: Config | None) -> bool:
    """Return whether the user starts the vLLM servers, which may then run on any machine."""
    return bool(inference) and fact(inference["_target_"], "is_external", False)


def needs_reference(config: Config) -> bool:
    """Return whether the run uses a reference model, for a KL penalty or as a teacher."""
    node = config["reference"]
    kind = node["_target_"]
    is_teacher = not fact(kind, "is_policy", False) or node.get("sees_hint", False)
    is_teacher |= fact(config["loss"]["_target_"], "stays_near_reference", False)
    # Assume that the loss reads the teacher, because reference_rules.py refuses an unread teacher.
    return config["kl"]["beta"] > 0 or (fact(kind, "has_logprobs", True) and is_teacher)


def references(config: Config) -> dict[str, Config]:
    """Return {dotted path: reference node}, one per environment if reference=per_env, else one."""
    if (node := config.get("reference")) is None:  # evaluations have no reference
        return {}
    if not isinstance(teachers := node.get("teachers"), Mapping):
        return {"reference": node}
    return {f"reference.teachers.{name}": teacher for name, teacher in teachers.items()}


def sees_hint(config: Config, env: str) -> bool:
    nodes = references(config)
    node = nodes.get("reference", nodes.get(f"reference.teachers.{env}", {}))
    return bool(node.get("sees_hint")) and needs_reference(config)


def fact(target: str, name: str, default: Any) -> Any:
    """Return the constant `name` of a class, or of a function's file; else `default`."""
    # As in Python's __mro__, a base that several classes share comes after these classes.
    order = reversed(dict.fromkeys(reversed(_with_bases(*definition_of(target)))))
    values = (_constant(*each, name) for each in order)
    return next((value for value in values if value is not None), default)


def _with_bases(module: Module, definition: Definition) -> list[tuple[Module, Definition]]:
    above = bases(module, definition) if isinstance(definition, ast.ClassDef) else ()
    return [(module, definition), *(each for base in above for each in _with_bases(*base))]


def _constant(module: Module, definition: Definition, name: str) -> Any:
    is_class = isinstance(definition, ast.ClassDef)
    for statement in definition.body if is_class else module.statements():
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
            ) if target == name:
                with suppress(ValueError):  # raised if the value is not a literal
                    return ast.literal_eval(value)
    return None
