"""Both generations of the verifiers library, each in its own process: they exclude each other.

cases.py needs the real library, which `make verifiers` installs. The checks before an episode is
played need no library.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from envs.episode import Episode, StopReason
from envs.messages import user
from envs.verifiers.adapter import Outcome, Row
from envs.verifiers.environment import Verifiers, load_adapter
from tests.support.launching import begin, ended

HERE = Path(__file__).parent
REPO = HERE.parents[1]
NEEDS = (REPO, HERE / "packages")
README = (REPO / "README.md").read_text()
SCRIPTED = "inference._target_=scripted_vllm.ScriptedVLLM sampler=sync sync.max_mismatch=1e9"

pytestmark = pytest.mark.timeout(900)


def paths_of(generation, *further) -> str:
    """Return PYTHONPATH with this generation of the library; skip the test if it is missing."""
    library = REPO / ".venv" / f"verifiers-{generation}"
    if not library.exists():
        pytest.skip(f"{library.name} is not installed for the tests: make verifiers")
    return os.pathsep.join(map(str, (library, *NEEDS, *further)))


@pytest.mark.parametrize("generation", ["v1", "classic"])
def test_the_cases_hold_with_the_real_library(generation, tmp_path):
    env = {**os.environ, "PYTHONPATH": paths_of(generation), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path / 'cases'}", str(HERE / "cases.py")]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


def test_without_the_library_the_bridge_says_what_to_install():
    if "verifiers" in sys.modules or find_spec("verifiers"):
        pytest.skip("the library is installed in this very environment")
    with pytest.raises(ValueError, match=r"owner/x needs .*`make verifiers`, then set PYTHONPATH"):
        load_adapter("owner/x", {})


@pytest.mark.slow
@pytest.mark.server
def test_the_readmes_command_trains_on_a_taskset(tmp_path):
    paths = paths_of("v1", REPO / "tests" / "support")
    (printed,) = [line for line in README.splitlines() if "train.py env=verifiers" in line]
    command = printed.replace("python", sys.executable, 1).replace("owner/name", "letter-tasks")
    command = command.replace("env.num_train=1000", "env.num_train=8")
    short = f"{SCRIPTED} max_steps=1 batch_size=4 group_size=2 output_dir={tmp_path} run_name=r"
    environment = {"PYTHONPATH": paths, "OFFBYONE_CACHE": str(tmp_path / "cache")}
    result = ended(begin(f"{command.strip()} {short}", REPO, environment), tmp_path / "r")
    assert result.status == 0, result.screen
    assert result.metrics[0]["rollout/errors"] == 0
    assert 0 <= result.metrics[0]["reward/letters"] <= 1


IMAGE = [{"type": "text", "text": "which?"}, {"type": "image_url", "image_url": {"url": "x"}}]


class Scripted:
    """An adapter of training rows, and perhaps eval rows. An episode gives its row's data."""

    max_concurrent = 8
    reward_weights = {"letters": 2.0}  # noqa: RUF012 as they write it

    def __init__(self, train, held_out=None):
        self._rows = {"train": train, "eval": held_out}

    def rows(self, split, limit):
        contents = self._rows[split]
        return contents and [Row([user(x)], x) for x in contents[:limit]]

    async def play(self, row, speak):
        rival = Outcome(4.5, {"letters": 2.0}, StopReason.MAX_TURNS)
        return {"": Outcome(2.0, {"letters": row.data == "y"}), "rival": rival}


def verifiers(*rows, **changes):
    options = {"args": None, "num_train": None, "num_eval": 0, "max_concurrent": None, **changes}
    env = Verifiers(id="o/x-y@1", **options)
    env.__dict__["_adapter"] = Scripted(*rows)  # in place of the library's
    return env


def test_held_out_rows_are_those_of_the_library_or_the_last_ones():
    for held_out, num_train, num_eval, expected in (
        (None, None, 3, ("abcdefg", "hij")),
        (None, 4, 3, ("abcd", "efg")),
        ("xyz", 4, 5, ("abcd", "xyz")),
    ):
        env = verifiers("abcdefghij", held_out, num_train=num_train, num_eval=num_eval)
        splits = [env.examples(split) for split in ("train", "eval")]
        found = ["".join(one.messages[0]["content"] for one in examples) for examples in splits]
        assert tuple(found) == expected
    with pytest.raises(ValueError, match="has 10 training examples, and holding out 10 "):
        verifiers("abcdefghij", num_eval=10).examples("train")
    with pytest.raises(ValueError, match=r"y@1: the policy reads only text, not \['image_url'\]"):
        verifiers("a", [IMAGE], num_eval=1).examples("train")


async def test_each_role_of_an_episode_has_its_own_outcome():
    env = verifiers("a", "xyz", num_eval=2)
    episode = Episode(env.examples("eval")[1], [], stop_reason=StopReason.STOP)
    await env.play(episode, None)
    assert await env.score(episode) == {"letters": 1.0, "unlisted": 0.0}
    assert (env.name, env.max_concurrent, episode.stop_reason) == ("x-y", 8, StopReason.STOP)
    limited = verifiers("a", max_concurrent=3)
    assert (len(limited.examples("train")), limited.max_concurrent) == (1, 3)
    episode.role = "rival"
    assert await env.score(episode) == {"letters": 2.0, "unlisted": 0.5}
    assert episode.stop_reason == StopReason.MAX_TURNS
    assert await env.score(Episode(episode.example, [])) == {"letters": 0.0, "unlisted": 0.0}
