"""Everything in conf/ and sweeps/ composes and passes the check.

A typo or a missing key is refused. The texts of refusals are stored in tests/golden/config.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.annotations import takes_only_int
from rl.config.build import build
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.config.signatures import options_of
from rl.config.transport import adapter_obstacle, transport, transport_problems
from tests.support import golden as stored
from tests.support.composing import CONF, SWEEPS, check_all, composed, with_choices
from tests.support.own_sync import RequestSender

DATA = Path(__file__).parents[2] / "support" / "data.jsonl"
# What a choice cannot do without, given as a user would.
COMPANIONS = {
    "loss=sft": ["sampler=demonstrations"],
    "critic=value": ["loss=ppo"],
    "sampler=transcripts": ["loss=sft", "sampler.path=text.jsonl"],
    "sampler=demonstrations": ["loss=sft"],
    "env=verifiers": ["env.id=owner/name"],
    "model=hf": ["model.path=Qwen/Qwen3-0.6B"],
    **{
        f"loss={loss}": ["reference.path=Qwen/Qwen3-0.6B"]
        for loss in ("distill", "forward_kl_topk", "reverse_kl_topk", "jsd_topk")
    },
    "reference=model": ["reference.path=Qwen/Qwen3-0.6B", "loss=distill"],
    "reference=endpoint": ["reference.url=http://a:8000/v1", "reference.model=b", "loss=distill"],
    "reference=per_env": [
        *("loss=distill", "env=mixture"),
        *(f"+reference@reference.teachers.{env}=model" for env in ("reverse-text", "arithmetic")),
        *(f"reference.teachers.{env}.path=a/b" for env in ("reverse-text", "arithmetic")),
    ],
    **{f"correction={path.stem}": ["updates_per_batch=2"] for path in CONF.glob("correction/*")},
    "sync=adapter": ["adapter=lora"],
    "inference=external": ["inference.urls=[http://localhost:8000]"],
    "env=wiki-search-judged": ["env.judge.url=http://localhost:1/v1", "env.judge.model=judge"],
    "env=agent": [f"env.dataset.path={DATA}", 'env.command=[sh, "{prompt}"]'],
    "env=composed": [f"env.dataset.path={DATA}"],
    "env=math-file": [f"env.questions.dataset.path={DATA}"],
}
# For evaluate.py alone (test_evaluation.py), and for sweeps alone (test_until.py).
NOT_TRAINED = {"client=messages", "until=decided"}
# For optimize_prompt.py alone (test_prompt_optimization.py).
SEARCHES = {f"experiment={path.stem}" for path in CONF.glob("experiment/optimize-*.yaml")}
CHOICES = sorted(
    {f"{p.parent.name}={p.stem}" for p in CONF.glob("*/*.yaml")} - NOT_TRAINED - SEARCHES
)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_is_a_run_that_could_start(choice):
    check(composed(choice, *COMPANIONS.get(choice, [])))


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_opens_with_its_question_and_composes(path):
    assert path.read_text().startswith("# ")
    assert path.read_text().splitlines()[0].endswith("?")
    check(composed(sweep=path.stem))
    hydra = yaml.safe_load(path.read_text())["hydra"]
    assert hydra["mode"] == "MULTIRUN"
    for key, values in hydra["sweeper"]["params"].items():
        listed = str(values).split(",") if "(" not in str(values) else []
        for value in {*listed[:1], *listed[-1:]}:
            check(composed(f"{key}={value}", sweep=path.stem))


def nodes(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every node of a configuration with its dotted path."""
    if not isinstance(value, dict):
        return []
    here = [(path, value)] if "_target_" in value else []
    return here + [
        found for key, item in value.items() for found in nodes(item, f"{path}.{key}".strip("."))
    ]


def test_a_typo_in_any_option_of_any_node_is_refused_with_the_name_that_was_meant(config):
    for path, node in nodes(config):
        for option in node.keys() & options_of(node["_target_"]).keys():
            typo, right = f"{option}{option[-1]}", dict(node)
            node.clear()
            # as the first key, before _target_
            node |= {typo: right[option]} | {k: v for k, v in right.items() if k != option}
            with pytest.raises(ConfigError) as caught:
                check(config)
            node.clear()
            node |= right
            (problem,) = caught.value.problems
            said = f"{path}.{typo} is not a key of {node['_target_']}: did you mean "
            assert problem.startswith(said)
    check(config)


def test_all_problems_are_reported_at_once(config):
    del config["seed"], config["optim"]["eps"], config["logger"]
    config["loss"]["clip_high"] = "high"
    config["buffer"] = None
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert sorted(caught.value.problems) == [
        "buffer is null, expected a node with _target_",
        "logger is missing: choose one with logger=<name of a file in conf/logger>",
        'loss.clip_high is "high", expected float',
        "optim.eps is missing: add it to the YAML of optim",
        "seed is missing: add it to the YAML of the run",
    ]
    assert str(caught.value).splitlines() == [f"- {p}" for p in caught.value.problems]


def test_every_refusal(config):
    """The problems of tests/golden/config/cases.yaml, and none for values at the limits."""
    cases = yaml.safe_load((stored.FOLDER / "config" / "cases.yaml").read_text())
    found = {}
    for name, changes in cases.items():
        try:
            check_all(with_choices(config, changes))
            found[name] = []
        except ConfigError as error:
            found[name] = [line.replace(str(Path.cwd()), "") for line in error.problems]
    stored.golden("config/problems", found)


def test_what_the_check_reads_about_the_shipped_choices(config):
    """Options (! required, # whole numbers), the sender of sync=auto, and obstacles of adapters."""
    found = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        if isinstance(target := (yaml.safe_load(path.read_text()) or {}).get("_target_"), str):
            options = options_of(target).items()
            found[f"{path.parent.name}={path.stem}"] = [
                f"{k}{'!' * o.required}{'#' * takes_only_int(o)}" for k, o in options
            ]
    for changes in (
        {"adapter": "=none"}, {}, {"model": "=tiny-moe"}, {"cluster": "=ray"}, {"sync": "=nccl"},
        {"adapter.rank": 513}, {"adapter.modules_to_save": ["a"]}, {"model.warm_start": None},
    ):  # fmt: skip
        given = with_choices(with_choices(config, {"adapter": "=lora"}), changes)
        made, why = transport(given), adapter_obstacle(given["adapter"], given["model"])
        found[str(changes)] = [made.name, made.has("adapter_only"), why]
    stored.golden("config/choices", found)


HF = ["model=hf", "model.path=Qwen/Qwen3-0.6B"]
LORA, NONE = "rl.model.lora.LoRA", "rl.model.lora.NoAdapter"


@pytest.mark.parametrize(
    ("overrides", "adapter", "how"),
    [
        (["adapter=lora"], LORA, "adapter"),
        (["adapter=lora", "sync=shm"], LORA, "shm"),
        (HF, LORA, "adapter"),
        ([*HF, "adapter=none"], NONE, "shm"),
        (["sync=gloo"], NONE, "gloo"),
        (["adapter=lora", "sync=ipc"], LORA, "ipc"),
        (["sync=nccl"], NONE, "nccl"),
    ],
)
def test_the_command_line_has_priority_and_auto_pushes_the_least(overrides, adapter, how):
    config = composed(*overrides)
    assert config["adapter"]["_target_"] == adapter
    chosen = transport(config)
    assert (chosen.name, chosen.has("adapter_only")) == (how, how == "adapter")
    sender = build(chosen.node)()
    assert sender.probe_rows == 4
    for key in ("is_placeholder", "one_host", "reader_copy", "on_gpus", "own_gpus"):
        assert chosen.has(key) == getattr(sender, key), key  # the check imports no sender


EXTERNAL = {"inference": {"_target_": "rl.inference.external.ExternalServers"}}
SPREAD = {"cluster": {"_target_": "rl.cluster.ray_cluster.RayCluster"}}
OWN = "sync._target_=tests.support.own_sync.RequestSender"


def refusals(*overrides, **changes):
    return list(transport_problems({**composed(*overrides), **changes}))


def test_a_user_adds_a_sender_by_its_target():
    chosen = transport(composed(OWN))
    assert (chosen.name, chosen.has("adapter_only")) == ("own_sync", False)
    assert isinstance(build(chosen.node)(), RequestSender)
    assert refusals(OWN) == refusals(OWN, **SPREAD) == []


def test_between_hosts_a_sender_for_one_host_is_refused_and_auto_pushes_the_adapter_or_by_gloo():
    for elsewhere in (EXTERNAL, SPREAD):
        assert transport({**composed(), **elsewhere}).name == "gloo"
        assert transport({**composed("adapter=lora"), **elsewhere}).name == "adapter"
        for name in ("shm", "ipc"):
            (problem,) = refusals(f"sync={name}", **elsewhere)
            assert problem.startswith(f"sync={name} needs trainer and vLLM on one host, but ")
            assert problem.endswith("use sync=gloo")
    for name in ("gloo", "nccl"):
        assert refusals(f"sync={name}", **SPREAD) == refusals(f"sync={name}") == []
