"""Every value of the YAML files, as stored files."""

import pytest
import yaml

from tests.support.composing import REPO, composed
from tests.support.golden import golden

MODEL = ["model.path=Qwen/Qwen3-0.6B"]
NEEDED = {"train": [], "warm_start": [], "evaluate": MODEL, "optimize_prompt": MODEL}


def exactly(value):
    """Return the value with floats as text, because a changed default is never a rounding error."""
    if isinstance(value, dict):
        return {str(key): exactly(item) for key, item in value.items() if key != "help"}
    if isinstance(value, list):
        return [exactly(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def test_the_values_of_every_yaml_file():
    """Each default, weight, limit, list of choices and _target_, without the comments."""
    folders = ("conf", "sweeps", "claims")
    paths = sorted(path for folder in folders for path in (REPO / folder).rglob("*.yaml"))
    read = {str(path.relative_to(REPO)): yaml.safe_load(path.read_text()) for path in paths}
    golden("configuration/files", exactly(read))


@pytest.mark.parametrize("primary", sorted(NEEDED))
def test_the_composed_configuration(primary, monkeypatch):
    """Each resolved value of a main file."""
    monkeypatch.chdir(REPO)
    config = composed("run_name=x", *NEEDED[primary], primary=primary)
    golden(f"configuration/{primary}", exactly(config))
