"""Every key in conf/ is read by some code, and the check refuses a configuration that lacks one."""

import re
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from inspect import getfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.schema import ConfigError
from rl.config.signatures import options_of
from tests.rl.config.test_shipped import CHOICES, COMPANIONS, nodes
from tests.support.composing import CONF, REPO, composed

TEXTS = [path.read_text() for path in CONF.rglob("*.yaml")]
TARGETS = {node["_target_"] for text in TEXTS for _, node in nodes(yaml.safe_load(text) or {}, "x")}
CODE = "\n".join(
    p.read_text() for name in ("rl", "losses", "envs") for p in REPO.glob(f"{name}/**/*.py")
)
# Keys that other keys refer to, as in ${model.learning_rate}.
REFERRED = {key.rpartition(".")[2] for text in TEXTS for key in re.findall(r"\$\{([\w.]+)\}", text)}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_key_of_a_shipped_node_is_read(target):
    module, _, name = target.rpartition(".")
    made = getattr(import_module(module), name)
    files = {getfile(each) for each in getattr(made, "__mro__", [made]) if each is not object}
    own = "\n".join(Path(file).read_text() for file in files)
    unread = {
        key
        for key in options_of(target)
        if key not in REFERRED
        and not re.search(rf"""\.{key}\b|["'.]{key}["']""", CODE)
        and len(re.findall(rf"^[^#\n]*\b{key}\b", own, re.MULTILINE)) < 2
    }
    assert not unread


def removals(config: dict[str, Any], group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each required key of a group's nodes, dotted, with the configuration that lacks it."""
    for path, node in nodes({group: config[group]}):
        options = options_of(node["_target_"])
        for key in node:
            if path.startswith("env.rewards.") and key == "_target_":
                continue  # fn and weight may stand there: the constructor says so
            if key != "_target_" and not (key in options and options[key].required):
                continue  # an option of every environment
            spoilt = deepcopy(config)
            parent = spoilt
            for part in path.split("."):
                parent = parent[part]
            del parent[key]
            yield f"{path}.{key}", spoilt


OF_GROUPS = [choice for choice in CHOICES if not choice.startswith("experiment=")]


@pytest.mark.parametrize("choice", [*OF_GROUPS, "trainer=as shipped"])
def test_a_missing_key_of_any_choice_is_refused_by_name(choice):
    group = choice.partition("=")[0]
    overrides = [] if group == "trainer" else [choice, *COMPANIONS.get(choice, [])]
    config = composed(*overrides)
    for key, spoilt in removals(config, group):
        with pytest.raises(ConfigError) as caught:
            check(spoilt)
        path, _, last = key.rpartition(".")
        (problem,) = caught.value.problems
        if last == "_target_":
            assert problem.startswith((f"{path} is ", f"{path.rpartition('.')[0]} has "))
        else:
            assert problem == f"{key} is missing: add it to the YAML of {path}"


def test_a_missing_key_or_group_at_the_top_is_refused_by_name(config):
    # Runs of older versions have no `init_from`, so these keys have defaults.
    for key in config.keys() - {"init_from", "init_optimizer"}:
        spoilt = {name: value for name, value in config.items() if name != key}
        with pytest.raises(ConfigError) as caught:
            check(spoilt)
        assert any(problem.startswith(f"{key} is missing: ") for problem in caught.value.problems)
