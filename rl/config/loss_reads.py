"""What a loss reads of its tokens, found in its source: a user's own is understood too."""

import ast
from collections.abc import Mapping
from functools import cache
from typing import Any

from rl.config.signatures import source

Config = Mapping[str, Any]


def uses_ratio(target: str) -> bool:
    """Whether a loss reads the probability that its tokens were sampled with."""
    return reads(target, {"anchor", "rollout_logprobs", "old_logprobs"})


def needs_reference(config: Config) -> bool:
    """Whether the loss or a penalty reads the logprobs of a reference."""
    return config["kl"]["beta"] > 0 or reads(config["loss"]["_target_"], {"ref_logprobs"})


def reads(target: str, attributes: set[str]) -> bool:
    """Whether the code of a target reads one of these attributes of anything."""
    module = source(target.rpartition(".")[0])
    assert module, "the target was found before"
    return bool(_attributes(module.tree) & attributes)


@cache
def _attributes(tree: ast.AST) -> frozenset[str]:
    """Every name that follows a dot."""
    return frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
