"""The YAMLs of loss, advantage and aggregation: options match signatures, overrides compose."""

import inspect
from importlib import import_module

import pytest
import yaml

from tests.support.composing import CONF, chosen, composed

OWN_GROUPS = ("loss", "advantage", "aggregation")
FILES = sorted(path for group in OWN_GROUPS for path in (CONF / group).glob("*.yaml"))

each_file = pytest.mark.parametrize("path", FILES, ids=[f"{p.parent.name}/{p.stem}" for p in FILES])


@each_file
def test_a_yaml_sets_every_option_of_its_function_and_no_other(path):
    node = chosen(path.parent.name, path.stem)
    module, _, name = node.pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters.values()
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert set(node) == {p.name for p in options}
    assert all(p.default is p.empty for p in options)


@each_file
def test_a_yaml_has_a_comment_at_its_top_and_above_each_option(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    last = "_target_" if "_target_" in yaml.safe_load(path.read_text()) else "  - _self_"
    start = next(i for i, line in enumerate(lines) if line.startswith(last))
    for i in range(start + 1, len(lines)):
        if not lines[i].startswith("#"):
            assert lines[i - 1].startswith("# "), f"{lines[i]} has no comment above it"


def test_a_loss_sets_other_groups_and_the_command_line_overrides_its_choices():
    config = composed("aggregation=token_mean", "loss=grpo", "advantage.epsilon=0.5")
    names = {group: config[group]["_target_"].rpartition(".")[2] for group in OWN_GROUPS}
    expected = {"loss": "ppo_clip", "advantage": "group_zscore", "aggregation": "token_mean"}
    assert names == expected
    assert config["advantage"]["epsilon"] == 0.5
    assert composed("loss=grpo")["aggregation"]["_target_"].endswith(".sequence_mean")
    assert composed("loss=dr_grpo")["aggregation"]["length"] == 256
    assert composed("loss=ppo")["critic"]["_target_"] == "rl.learner.critic.ValueModel"
