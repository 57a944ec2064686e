"""Every key in conf/ is read by the code, and a configuration that lacks one is refused."""

import re
import tokenize
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.schema import ConfigError
from rl.config.signatures import definition_of, read
from tests.rl.config.test_shipped import CHOICES, COMPANIONS, nodes
from tests.support.composing import CONF, REPO, composed

TEXTS = [path.read_text() for path in CONF.rglob("*.yaml")]
TARGETS = {node["_target_"] for text in TEXTS for _, node in nodes(yaml.safe_load(text) or {}, "x")}


@pytest.fixture(scope="module")
def read_anywhere() -> str:
    """Return the text of all sources and YAML files."""
    files = [path for folder in ("rl", "losses", "envs") for path in (REPO / folder).rglob("*.py")]
    return "\n".join([*TEXTS, *(path.read_text() for path in files)])


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_option_of_a_shipped_node_is_read(target: str, read_anywhere: str) -> None:
    module, _ = definition_of(target)
    with module.path.open("rb") as file:
        names = [token.string for token in tokenize.tokenize(file.readline)]
    for option in read(target):
        # As a name besides the parameter, as an attribute, as a key, or in ${...} of another key.
        by_name = names.count(option) > 1
        assert by_name or re.search(rf'\.{option}\b|\["{option}"|get\("{option}"', read_anywhere)


def removals(config: dict[str, Any], group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key of a group's nodes, dotted, with the configuration that lacks it."""
    for path, node in nodes({group: config[group]}):
        for key in node:
            spoilt = deepcopy(config)
            parent = spoilt
            if key != "_target_" and read(node["_target_"])[key].configured:
                continue  # every environment has it, and does without
            if path.startswith("env.rewards.") and key == "_target_":
                continue  # fn and weight may stand there: the constructor says so
            for part in path.split("."):
                parent = parent[part]
            del parent[key]
            yield f"{path}.{key}", spoilt


OF_GROUPS = [choice for choice in CHOICES if not choice.startswith("experiment=")]


@pytest.mark.parametrize("choice", [*OF_GROUPS, "trainer=as shipped"])
def test_a_missing_key_of_any_choice_is_refused_by_name(choice: str, tmp_path: Path) -> None:
    """Keys of the free-form parts (deepspeed, inference.args) are not ours to miss."""
    group = choice.partition("=")[0]
    overrides = [] if group == "trainer" else [choice, *COMPANIONS.get(choice, [])]
    config = composed(*overrides, f"output_dir={tmp_path}")
    for key, spoilt in removals(config, group):
        with pytest.raises(ConfigError) as caught:
            check(spoilt)
        path, _, last = key.rpartition(".")
        (problem,) = caught.value.problems
        if last == "_target_":
            assert problem.startswith(f"{path} is ")
            assert problem.endswith(", expected a node with _target_")
        else:
            assert problem == f"{key} is missing: add it to the YAML that sets {path}"


def test_a_missing_key_or_group_at_the_top_is_refused_by_name(config: dict[str, Any]) -> None:
    for key in list(config):
        spoilt = {name: value for name, value in config.items() if name != key}
        with pytest.raises(ConfigError) as caught:
            check(spoilt)
        assert any(problem.startswith(f"{key} is missing: ") for problem in caught.value.problems)
