"""The YAMLs of loss, advantage and aggregation: options match signatures, overrides compose."""

import inspect
from importlib import import_module
from typing import Any

import pytest
import yaml

from tests.support.composing import CONF, chosen, composed

OWN_GROUPS = ("loss", "advantage", "aggregation")
FILES = sorted(path for group in OWN_GROUPS for path in (CONF / group).glob("*.yaml"))

# loss: function, advantage, aggregation
ALGORITHMS = {
    "cispo": ("cispo", "group_mean", "token_mean"),
    "grpo": ("ppo_clip", "group_zscore", "sequence_mean"),
    "dr_grpo": ("ppo_clip", "group_mean", "constant_length"),
    "dapo": ("ppo_clip", "group_zscore", "token_mean"),
    "ppo_clip": ("ppo_clip", "group_zscore", "token_mean"),
    "ppo_clip_kl": ("ppo_clip", "group_zscore", "token_mean"),
    "ppo": ("ppo_clip", "none", "token_mean"),
    "gdpo": ("ppo_clip", "group_zscore", "sequence_mean"),
    "lite_ppo": ("ppo_clip", "group_mean", "token_mean"),
    "reinforce_pp": ("ppo_clip", "none", "token_mean"),
    "gspo": ("gspo", "group_zscore", "sequence_mean"),
    "sapo": ("sapo", "group_zscore", "sequence_mean"),
    "rloo": ("reinforce", "rloo", "token_mean"),
    "reinforce": ("reinforce", "group_mean", "token_mean"),
    "masked_is": ("masked_is", "group_mean", "token_mean"),
    "m2po": ("M2PO", "group_zscore", "token_mean"),
    "dppo": ("dppo", "group_mean", "token_mean"),
    "distill": ("distill", "none", "token_mean"),
    "forward_kl_topk": ("forward_kl_topk", "none", "token_mean"),
    "reverse_kl_topk": ("reverse_kl_topk", "none", "token_mean"),
    "jsd_topk": ("jsd_topk", "none", "token_mean"),
    "sft": ("cross_entropy", "none", "token_mean"),
}


def names(config: dict[str, Any]) -> tuple[str, ...]:
    return tuple(config[group]["_target_"].rpartition(".")[2] for group in OWN_GROUPS)


@pytest.mark.parametrize("path", FILES, ids=[f"{p.parent.name}/{p.stem}" for p in FILES])
def test_a_yaml_sets_every_option_of_its_function_and_no_other(path):
    node = chosen(path.parent.name, path.stem)
    module, _, name = node.pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters.values()
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert set(node) == {p.name for p in options}
    assert all(p.default is p.empty for p in options)


@pytest.mark.parametrize("path", FILES, ids=[f"{p.parent.name}/{p.stem}" for p in FILES])
def test_a_yaml_has_a_comment_at_its_top_and_above_each_option(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    last = "_target_" if "_target_" in yaml.safe_load(path.read_text()) else "  - _self_"
    start = next(i for i, line in enumerate(lines) if line.startswith(last))
    for i in range(start + 1, len(lines)):
        if not lines[i].startswith("#"):
            assert lines[i - 1].startswith("# "), f"{lines[i]} has no comment above it"


@pytest.mark.parametrize("loss", ALGORITHMS)
def test_a_loss_sets_its_advantage_and_aggregation(loss):
    assert names(composed(f"loss={loss}", "++reference.path=teacher")) == ALGORITHMS[loss]


def test_some_losses_set_further_groups():
    assert composed("loss=dapo")["loss"]["clip_high"] == 0.28
    assert composed("loss=ppo")["critic"]["_target_"] == "rl.learner.critic.ValueModel"
    assert composed("loss=ppo_clip")["critic"]["_target_"] == "rl.learner.critic.NoCritic"
    for loss in ("gdpo", "lite_ppo", "reinforce_pp"):
        assert composed(f"loss={loss}")["batch_credit"]["_target_"].endswith(".whiten")
    assert composed("loss=gdpo")["reward"]["normalise_each"]
    for loss in ("reinforce", "rloo", "distill"):  # they do not correct staleness
        assert composed(f"loss={loss}", "++reference.path=t")["sampler"]["max_staleness"] == 0
    assert composed("loss=cispo")["sampler"]["max_staleness"] == 1


def test_the_command_line_overrides_the_choices_of_a_loss():
    config = composed("aggregation=token_mean", "loss=grpo", "advantage.epsilon=0.5")
    assert names(config) == ("ppo_clip", "group_zscore", "token_mean")
    assert config["advantage"]["epsilon"] == 0.5
    assert composed("loss=dr_grpo")["aggregation"]["length"] == 256
