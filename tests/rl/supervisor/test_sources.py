"""What a target needs is found in its source; what it may do without is not demanded."""

import pytest

from rl.config.schema import ConfigError
from rl.supervisor.sources import check_imports

FAST = "import a_kernel_of_nobodys\n"
WITHOUT = {
    "try": "try:\n    import knobs_fast\nexcept ImportError:\n    knobs_fast = None\n",
    "def": "def loss():\n    import knobs_fast\n",
    "if": "if False:\n    import knobs_fast\n",
}


@pytest.mark.parametrize("way", WITHOUT)
def test_what_may_be_missing_is_not_demanded(modules, way):
    (modules / "knobs_fast.py").write_text(FAST)
    (modules / "knobs_loss.py").write_text(WITHOUT[way])
    check_imports({"loss": {"_target_": "knobs_loss.loss"}})


def test_what_every_import_needs_is_named_with_the_group_and_the_file(modules):
    (modules / "knobs_fast.py").write_text(FAST)
    (modules / "knobs_loss.py").write_text("from knobs_fast import x\n")
    with pytest.raises(ConfigError) as caught:
        check_imports({"loss": {"_target_": "knobs_loss.loss"}})
    (problem,) = caught.value.problems
    assert problem.startswith("loss: knobs_loss.loss cannot be imported, for ")
    assert "knobs_fast.py imports a_kernel_of_nobodys, which is not installed" in problem


def test_a_slip_in_what_is_imported_is_said_with_its_line(modules):
    (modules / "knobs_fast.py").write_text("x = (\n")
    (modules / "knobs_loss.py").write_text("from knobs_fast import x\n")
    with pytest.raises(ConfigError, match=r"knobs_fast.py, line 1: '\(' was never closed"):
        check_imports({"loss": {"_target_": "knobs_loss.loss"}})
