"""Nested environments, the key of the warm start, and the user's own components."""

import json
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from rl.config.build import _import_target, construct
from rl.config.check import check
from rl.config.schema import ConfigError, Run
from rl.supervisor.warm_start import warm_start_key
from tests.support.composing import changed, composed, only_problem
from tests.support.launching import train

TOOLS = """
def search(query: str, index: dict, *, limit: int) -> str:
    'Search.'
    return index[query][:limit]
def found(episode, index, *, bonus: float) -> float: return bonus
"""


@pytest.fixture(scope="module")
def mixture():
    return composed("env=mixture", "output_dir=nowhere")


def test_a_mixture_is_shipped_with_two_environments_and_can_be_changed_key_by_key():
    added = ["+env@env.envs.hard=arithmetic", "env.envs.hard.max_operand=99", "+env.weights.hard=2"]
    removed = ["~env.envs.reverse-text", "~env.weights.reverse-text"]
    more = composed("env=mixture", *added, *removed)["env"]
    assert more["weights"] == {"arithmetic": 1.0, "hard": 2}
    assert [node["max_operand"] for node in more["envs"].values()] == [20, 99]


def test_a_user_keeps_choices_and_modules_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text(
        "defaults:\n  - reverse-text@envs.words\n  - composed@envs.long\n  - _self_\n"
        "_target_: envs.mixture.Mixture\n"
        "envs: {long: {dataset: {path: a.jsonl}, rewards: {long: {_target_: mine.long}}}}\n"
        "weights: {words: 1.0, long: 3.0}\n"
    )
    (tmp_path / "mine.py").write_text("def long(episode, *, bonus: float) -> float: ...\n")
    done = train("--config-dir", ".", "env=mine", output_dir=tmp_path)
    assert done.stderr == (  # all else is right, mine.long was found
        "this run cannot start:\n- env.envs.long.rewards.long.bonus is missing: add it to the YAML "
        "of env.envs.long.rewards.long\n"
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("env.envs.arithmetic.max_operand", "9", ' is "9", expected int'),
        ("env.envs.arithmetic.reward_weights", {"correct": 0}, "={'correct': 0} makes every rew"),
        ("env.weights.arithmetic", "much", ' is "much", expected float'),
        ("env.envs.more", 3, " is 3, expected a node with _target_"),
    ],
)
def test_mistakes_inside_a_mixture_are_named_by_their_path(mixture, tmp_path, key, value, problem):
    config = changed(mixture, {"output_dir": str(tmp_path), key: value})
    assert only_problem(config).startswith(key + problem)


@pytest.fixture
def parts(modules):
    """Return an environment with a tool and a reward of the user's own."""
    (modules / "knobs_parts.py").write_text(TOOLS)
    (modules / "data.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    config = composed("env=composed", f"env.dataset.path={modules}/data.jsonl", "run_name=here")
    config["output_dir"] = str(modules / "outputs")
    config["env"] |= {"tools": [{"_target_": "knobs_parts.search", "limit": 3}], "max_turns": 3}
    config["env"]["shared"] = {"index": {"paris": "a city"}}
    config["env"]["rewards"]["found"] = {"_target_": "knobs_parts.found", "bonus": 1.0}
    return config


def test_a_users_own_components_are_checked_by_their_signatures(parts):
    check(parts)
    parts["env"]["tools"][0] = {"_target_": "knobs_parts.search", "limt": 3}
    parts["env"]["rewards"]["found"] = {"_target_": "knobs_parts.found", "index": 3, "bonus": "x"}
    parts["env"]["dataset"]["_target_"] = "envs.datasets.JsonLine"
    with pytest.raises(ConfigError) as caught:
        check(parts)
    assert sorted(caught.value.problems) == [
        "env.dataset._target_ is envs.datasets.JsonLine, but envs.datasets has no function or "
        "class 'JsonLine': did you mean JsonLines?",
        'env.rewards.found.bonus is "x", expected float',
        "env.rewards.found.index is not a key of knobs_parts.found: it has bonus",
        "env.tools.0.limt is not a key of knobs_parts.search: did you mean limit?",
    ]


def key_of(config: dict[str, Any]) -> str:
    return warm_start_key(Run.of(config), [])


def test_a_warm_start_depends_on_what_a_mixture_shows_and_not_on_its_rewards(mixture):
    before = key_of(mixture)
    unrelated = {"env.envs.arithmetic.reward_weights": {"correct": 9.0}, "output_dir": "elsewhere"}
    assert key_of(changed(mixture, unrelated)) == before
    for key, value in {"env.envs.arithmetic.max_operand": 5, "env.weights.arithmetic": 2.0}.items():
        assert key_of(changed(mixture, {key: value})) != before


def test_a_warm_start_depends_on_the_source_and_the_files_of_every_part(parts, modules):
    before, run = key_of(parts), Run.of(deepcopy(parts))
    assert warm_start_key(run, []) == before
    assert run == Run.of(parts)  # it is not changed
    data = modules / "data.jsonl"
    text = data.read_text()
    data.write_text(text.replace('"a"', '"b"'))
    assert key_of(parts) != before
    data.write_text(text)
    assert key_of(parts) == before


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("x = 1\nclip = nothing * 2\n", "NameError: name 'nothing' is not defined"),
        ("import torch_of_nobody\n", "ModuleNotFoundError: No module named 'torch_of_nobody'"),
        ("def loss(tokens, *, clip: float):\n    retrun tokens\n", "SyntaxError: invalid syntax"),
        # The innermost frame of this error is in Python's own <frozen importlib._bootstrap>.
        ("from importlib import util\nx = util.module_from_spec(3)\n", "AttributeError: 'int' obj"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_line(source, sentence, modules):
    name = f"knobs_{len(source)}"
    (modules / f"{name}.py").write_text(source)
    line = 1 if source.startswith("import ") else 2
    with pytest.raises(ValueError, match=sentence) as caught:
        _import_target(name, f"{name}.loss")
    assert str(caught.value).startswith(f"{name}.loss cannot be imported: ")
    assert str(caught.value).endswith(f"{name}.py:{line})")


OWN = """
from rl.rollouts.example_order import ExampleOrder
class Forgetful(ExampleOrder):
    def observe(self, place, group): ...
class Needy:
    def check_machine(self): raise OSError("no sandbox")
"""


def test_an_order_that_would_forget_on_a_resume_is_refused_and_nothing_starts(modules):
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
    overrides = ["order._target_=knobs_own.Forgetful", "run_name=x"]
    done = train(*overrides, output_dir=modules, PYTHONPATH=str(modules))
    assert done.returncode == 2, done.stderr
    assert "order: Forgetful observes groups, but a" in done.stderr + done.stdout
    assert not (modules / "x" / "config.yaml").exists()


def test_a_syntax_error_in_a_users_file_is_reported_with_its_line(modules):
    (modules / "knobs_slip.py").write_text("def loss(tokens):\n    return (\n")
    problem = only_problem(changed(composed(), {"loss": {"_target_": "knobs_slip.loss"}}))
    assert problem == f"{modules}/knobs_slip.py, line 2: '(' was never closed"
