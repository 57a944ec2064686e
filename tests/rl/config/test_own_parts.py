"""A user's own order and loss are checked before anything starts."""

import sys
from types import SimpleNamespace

import pytest

from rl.config.build import construct
from rl.config.schema import ConfigError
from tests.support.composing import changed, composed, only_problem
from tests.support.launching import train

FORGETFUL = """
from rl.rollouts.example_order import ExampleOrder


class Forgetful(ExampleOrder):
    def observe(self, place, group): ...

class Needy:
    def check_machine(self):
        raise OSError("no sandbox")
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_forgetful.py").write_text(FORGETFUL)
    monkeypatch.delitem(sys.modules, "own_forgetful", raising=False)
    return tmp_path


def test_an_order_that_would_forget_on_a_resume_is_refused(modules):
    nodes = {"order": "Forgetful", "env": "Needy", "client": "Needy"}
    run = {key: {"_target_": f"own_forgetful.{name}"} for key, name in nodes.items()}
    with pytest.raises(ConfigError) as caught:
        construct(SimpleNamespace(**run, reference=None), [*run, "reference"])
    assert caught.value.problems == [
        "order: Forgetful observes groups, but a resumed run would lose its state: define "
        "state() and load()",
        "env: OSError: no sandbox",
    ]


def test_a_syntax_error_in_a_users_file_is_reported_with_its_line(modules):
    (modules / "own_slip.py").write_text("def loss(tokens):\n    return (\n")
    problem = only_problem(changed(composed(), {"loss": {"_target_": "own_slip.loss"}}))
    assert problem == f"{modules}/own_slip.py, line 2: '(' was never closed"


def test_train_py_reports_the_order_and_starts_nothing(modules, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    overrides = ["order._target_=own_forgetful.Forgetful", "run_name=x"]
    done = train(*overrides, output_dir=folder, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "order: Forgetful observes groups, but a" in done.stderr + done.stdout
    assert not (folder / "x" / "config.yaml").exists()
