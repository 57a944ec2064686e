"""Everything in conf/ and sweeps/ composes and passes the check, and nodes take what they should.

A typo or a missing key is refused. The texts of refusals are stored in tests/golden/config.
"""

import sys
from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rl.config.build import build, construct
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.config.signatures import options_of
from rl.config.transport import adapter_obstacle, transport, transport_problems
from tests.support import golden as stored
from tests.support.composing import (
    CONF,
    SWEEPS,
    changed,
    check_all,
    composed,
    only_problem,
    with_choices,
)
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
# For optimize_prompt.py alone (tests/lab/prompts/test_optimize.py).
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


def test_how_an_adapter_is_pushed(config):
    """The sender of sync=auto, and obstacles of adapters."""
    found = {}
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


def test_the_command_line_has_priority_and_auto_pushes_the_least():
    for overrides, adapter, how in (
        (["adapter=lora", "sync=shm"], LORA, "shm"),
        (HF, LORA, "adapter"),
        ([*HF, "adapter=none"], NONE, "shm"),
        (["sync=gloo"], NONE, "gloo"),
        (["adapter=lora", "sync=ipc"], LORA, "ipc"),
        (["sync=nccl"], NONE, "nccl"),
    ):
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
OWN_SYNC = "sync._target_=tests.support.own_sync.RequestSender"


def refusals(*overrides, **changes):
    return list(transport_problems({**composed(*overrides), **changes}))


def test_a_user_adds_a_sender_by_its_target():
    chosen = transport(composed(OWN_SYNC))
    assert (chosen.name, chosen.has("adapter_only")) == ("own_sync", False)
    assert isinstance(build(chosen.node)(), RequestSender)
    assert refusals(OWN_SYNC) == refusals(OWN_SYNC, **SPREAD) == []


def test_between_hosts_a_sender_for_one_host_is_refused_and_auto_pushes_the_adapter_or_by_gloo():
    for elsewhere in (EXTERNAL, SPREAD):
        assert transport({**composed(), **elsewhere}).name == "gloo"
        assert transport({**composed("adapter=lora"), **elsewhere}).name == "adapter"
        for name in ("shm", "ipc"):
            assert len(refusals(f"sync={name}", **elsewhere)) == 1
    for name in ("gloo", "nccl"):
        assert refusals(f"sync={name}", **SPREAD) == refusals(f"sync={name}") == []


BASE = """
import does_not_exist_anywhere
from dataclasses import dataclass, field
from typing import ClassVar, Literal
Speed = Literal["slow", "fast"]
@dataclass(frozen=True, kw_only=True)
class Base:
    kind: ClassVar[str] = "base"
    steps: int
    rate: float = 0.1
    made: int = field(init=False, default=0)
@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    rate: float
    names: list[str] = field(default_factory=list)
class Written:
    def __init__(self, folder, *, size: int, speed: Speed = "slow") -> None: ...
async def call(tokens, scale=1, *, low: float, high: "float | None" = None): ...
"""
IMPORTING = """
from knobs_base import Derived as Renamed, Written
class Child(Renamed):
    def method(self, *, other: int): ...
class Written(Written): ...
"""


@pytest.mark.parametrize(
    ("target", "required", "optional"),
    [
        ("knobs_base.Derived", ["rate", "steps"], ["names"]),
        ("knobs_base.Written", ["size"], ["speed"]),
        ("knobs_base.call", ["low"], ["high"]),
        ("knobs_importing.Child", ["rate", "steps"], ["names"]),
        ("knobs_importing.Written", ["size"], ["speed"]),
    ],
)
def test_options_are_read_without_importing_the_module(target, required, optional, modules):
    (modules / "knobs_base.py").write_text(BASE)
    (modules / "knobs_importing.py").write_text(IMPORTING)
    options = options_of(target)
    assert sorted(key for key, option in options.items() if option.required) == required
    assert sorted(key for key, option in options.items() if not option.required) == optional
    assert "knobs_base" not in sys.modules


def take(modules: Path, annotation: str) -> str:
    """Write a function with one option `x` of this annotation and return its target."""
    name = f"knobs_x{len(list(modules.iterdir()))}"
    (modules / f"{name}.py").write_text(
        "from collections.abc import Mapping, Sequence\n"
        "from pathlib import Path\n"
        "from typing import Annotated, Any, Literal, Optional, Union\n"
        "from msgspec import Meta\n"
        "Alias = Literal['slow', 'fast']\n"
        "Rate = Annotated[float, Meta(gt=0, le=1)]\n"
        "class Part:\n    def __init__(self, *, size: int) -> None: self.size = size\n"
        "def part(*, size: int): return size\n"
        f"def f(*, x: {annotation}): return x\n"
    )
    invalidate_caches()
    return f"{name}.f"


@pytest.mark.parametrize(
    ("annotation", "value", "becomes"),
    [
        ("float", 5, 5.0),
        ("'int | None'", 4, 4),
        ("Literal[1, None]", None, None),
        ("Alias", "fast", "fast"),
        ("Rate", 1, 1.0),
        ("tuple[float, ...]", [1, 2], (1.0, 2.0)),
        ("Mapping[str, list[int]]", {"a": [1]}, {"a": [1]}),
        ("Path", "a/b", Path("a/b")),
        ("Any", {"a": [1, None]}, {"a": [1, None]}),
        ("'unheard.Of'", 3, 3),
    ],
)
def test_a_value_becomes_what_its_annotation_says(modules, annotation, value, becomes):
    made = build({"_target_": take(modules, annotation), "x": value})()
    assert made == becomes
    assert type(made) is type(becomes)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        ("int", True, "is true, expected int"),
        ("list[float]", [float("inf")], "x.0 is inf, expected a finite number"),
        ("Rate", 0, "=0, but it must be > 0"),
        ("Rate | None", 1.5, "=1.5, but it must be <= 1"),
        ("tuple[int, str]", [1], "is [1], expected list of length 2"),
        ("Part", {"size": 3}, 'is {"size": 3}, expected a node with _target_'),
        ("Part | int", "x", 'is "x", expected int, or a node with _target_'),
        ("int", {"_target_": "a.b"}, "is a node, expected int"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(modules, annotation, value, said):
    with pytest.raises(ValueError, match=r"expected|must be") as caught:
        build({"_target_": take(modules, annotation), "x": value})
    assert said in str(caught.value)


def test_a_nested_node_is_built_first_and_a_class_among_them_is_instantiated(modules):
    target = take(modules, "Any")
    module = target.removesuffix(".f")
    part = {"_target_": f"{module}.Part", "size": 3}
    function = {"_target_": f"{module}.part", "size": 4}
    made = build({"_target_": target, "x": {"one": part, "two": [function]}})()
    assert made["one"].size == 3
    assert made["two"][0]() == 4
    union = take(modules, "Part | int")
    assert build({"_target_": union, "x": part})().size == 3
    assert build({"_target_": union, "x": 5})() == 5


def test_a_nested_node_is_checked_with_its_whole_path(modules, config):
    module = take(modules, "Any").removesuffix(".f")
    part = {"_target_": f"{module}.Part", "sise": 3, "size": "big"}
    config["env"] = {"_target_": f"{module}.f", "x": [part]}
    with pytest.raises(ConfigError) as caught:
        check(config)
    said = f"env.x.0.sise is not a key of {module}.Part: did you mean size?"
    assert {said, 'env.x.0.size is "big", expected int'} <= set(caught.value.problems)


OWN = """
from rl.rollouts.example_order import ExampleOrder
class Forgetful(ExampleOrder):
    def observe(self, place, group): ...
class Needy:
    def check_machine(self): raise OSError("no sandbox")
"""


def test_an_order_that_would_forget_and_an_unusable_machine_are_refused(modules):
    (modules / "knobs_own.py").write_text(OWN)
    nodes = {"order": "Forgetful", "env": "Needy", "client": "Needy"}
    run = {key: {"_target_": f"knobs_own.{name}"} for key, name in nodes.items()}
    with pytest.raises(ConfigError) as caught:
        construct(SimpleNamespace(**run, reference=None), [*run, "reference"])
    order, env = caught.value.problems
    assert order == (
        "order: Forgetful observes groups, but a resumed run would lose its state: define "
        "state() and load()"
    )
    assert env == "env: OSError: no sandbox"


def test_a_syntax_error_in_a_users_file_is_reported_with_its_line(modules):
    (modules / "knobs_slip.py").write_text("def loss(tokens):\n    return (\n")
    problem = only_problem(changed(composed(), {"loss": {"_target_": "knobs_slip.loss"}}))
    assert problem == f"{modules}/knobs_slip.py, line 2: '(' was never closed"
