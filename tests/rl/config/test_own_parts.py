"""A user's own order, logger and loss are checked before the run starts."""

import sys
from types import SimpleNamespace

import pytest

from rl.config.build import construct
from rl.config.check import check
from rl.config.schema import ConfigError
from tests.support.composing import changed, composed, only_problem
from tests.support.launching import train

PARTS = """
class Copying:
    needs_package = "no_such_package"
"""
FORGETFUL = """
from rl.rollouts.example_order import ExampleOrder


class Forgetful(ExampleOrder):
    def observe(self, place, group): ...
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("own_parts", PARTS), ("own_forgetful", FORGETFUL)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_an_order_that_would_forget_on_a_resume_is_refused(modules):
    with pytest.raises(ConfigError) as caught:
        construct(SimpleNamespace(order={"_target_": "own_forgetful.Forgetful"}), ["order"])
    assert caught.value.problems == [
        "order: Forgetful observes groups and a resumed run would know nothing of them: give "
        "it state() and load(), too"
    ]


def test_a_logger_whose_package_is_not_installed_is_refused(modules):
    own = {"_target_": "own_parts.Copying"}
    several = {"_target_": "rl.trainer.loggers.Loggers", "loggers": {"own": own}}
    for path, logger in (("logger", own), ("logger.loggers.own", several)):
        problem = only_problem(changed(composed(), {"logger": logger}))
        assert problem.startswith(f"{path}: own_parts.Copying needs the package no_such_package")
    for installed in ("tensorboard", "several"):
        check(composed(f"logger={installed}"))


def test_a_syntax_error_in_a_users_file_is_reported_with_its_line(modules):
    (modules / "own_slip.py").write_text("def loss(tokens):\n    return (\n")
    problem = only_problem(changed(composed(), {"loss": {"_target_": "own_slip.loss"}}))
    assert problem == f"{modules}/own_slip.py, line 2: '(' was never closed"


def test_a_run_with_such_an_order_does_not_start(modules, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    order = "order._target_=own_forgetful.Forgetful"
    # From the folder of a user whose module it is.
    done = train(order, "run_name=x", output_dir=folder, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "order: Forgetful observes groups and a" in done.stderr + done.stdout
    assert not (folder / "x" / "config.yaml").exists()
