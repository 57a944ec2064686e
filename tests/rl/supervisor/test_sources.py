"""The files that a cached result depends on: a module's own and those that it imports."""

import pytest

from rl.supervisor.sources import module_files

IMPORTS = {
    "at the top": "from knobs_fast import x\n",
    "in a try": "try:\n    import knobs_fast\nexcept ImportError:\n    knobs_fast = None\n",
    "in a function": "def loss():\n    import knobs_fast\n",
    "in an if": "if False:\n    import knobs_fast\n",
}


@pytest.mark.parametrize("where", IMPORTS)
def test_every_import_counts_and_libraries_do_not(modules, where):
    (modules / "knobs_fast.py").write_text("import numpy\nimport json\nimport missing_anywhere\n")
    (modules / "knobs_loss.py").write_text(IMPORTS[where])
    files = module_files(["knobs_loss"])
    assert files == [modules / "knobs_fast.py", modules / "knobs_loss.py"]


def test_a_package_that_is_left_out_is_not_followed(modules):
    (modules / "knobs_loss.py").write_text("from losses.tokens import Tokens\n")
    assert module_files(["knobs_loss"], ["losses"]) == [modules / "knobs_loss.py"]
