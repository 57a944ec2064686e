"""examples/own-harness: an environment of one's own tools, objects and rewards, by YAML alone."""

import pytest

from rl.config.build import build
from rl.config.check import check
from tests.support.composing import REPO, composed

HOME = REPO / "examples" / "own-harness"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.syspath_prepend(str(HOME))
    monkeypatch.chdir(HOME)
    return composed("experiment=own-harness", config_dir=HOME / "conf")


def test_the_experiment_passes_the_check(config, tmp_path):
    check({**config, "output_dir": str(tmp_path)})


async def test_the_policy_searches_the_shared_index(config):
    env = build(config["env"])()
    (example, *_) = env.examples("train")
    assert "Lake" in example.messages[-1]["content"]
    (search,) = env.tool_specs
    assert search["description"] == "Search the encyclopedia."
    assert list(search["parameters"]["properties"]) == ["query"]  # the index is not the policy's
