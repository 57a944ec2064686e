"""Both generations of the verifiers library, each in its own process: they exclude each other.

The *_cases.py files in this folder need the real library, which `make verifiers` installs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPO = HERE.parents[1]
NEEDS = (REPO, HERE / "packages")

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("direction", ["import", "export"])
@pytest.mark.parametrize("generation", ["v1", "classic"])
def test_the_cases_hold_with_the_real_library(generation, direction, tmp_path):
    library = REPO / ".venv" / f"verifiers-{generation}"
    if not library.exists():
        pytest.skip(f"{library.name} is not installed for the tests: make verifiers")
    paths = os.pathsep.join(map(str, (library, *NEEDS)))
    flags = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'cases'}"]
    cases = HERE / f"{direction}_cases.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, str(cases)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": paths, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_without_the_library_the_bridge_says_what_to_install():
    from envs.verifiers.environment import load_adapter

    if "verifiers" in sys.modules or _installed():
        pytest.skip("the library is installed in this very environment")
    with pytest.raises(ValueError, match=r"owner/x needs .* make verifiers, and PYTHONPATH"):
        load_adapter("owner/x", {})


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("verifiers") is not None
