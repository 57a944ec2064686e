"""The supervised run that makes the policy a run starts from."""

import os
import tempfile
from pathlib import Path

import pytest

from rl.config.schema import Run
from rl.runtime.folder import RunFolder
from rl.supervisor.sources import module_files
from rl.supervisor.warm_start import keep_result, warm_start_key, warm_start_run
from tests.support.composing import REPO, composed


def supervised(*overrides: str) -> Run:
    recipe = composed("loss=sft", "sampler=demonstrations")
    return warm_start_run(Run.of(composed(*overrides)), recipe, Path("somewhere/warm"))


def test_the_warm_start_uses_the_corruption_rate_of_the_model() -> None:
    made = supervised(
        "model.warm_start.corruption_rate=0.25", "model.warm_start.steps=33", "seed=5"
    )
    assert made.sampler["_target_"] == "rl.sampling.demonstrations.DemonstrationSampler"
    assert made.sampler["corruption_rate"] == 0.25
    assert (made.max_steps, made.group_size, made.seed) == (33, 1, 0)


def test_supervised_training_alone_uses_uncorrupted_demonstrations() -> None:
    assert composed("loss=sft", "sampler=demonstrations")["sampler"]["corruption_rate"] == 0


@pytest.mark.parametrize(
    "change",
    ["model.warm_start.corruption_rate=0.25", "model.warm_start.steps=33", "env.max_length=4"],
)
def test_a_change_to_the_warm_start_changes_its_key(change: str) -> None:
    assert warm_start_key(supervised(change)) != warm_start_key(supervised())


@pytest.mark.parametrize("text", ["Be brief. " * 30, "~Be brief."])
def test_a_system_prompt_that_cannot_be_a_path_changes_the_key(text: str) -> None:
    assert warm_start_key(supervised(f"env.system_prompt='{text}'")) != warm_start_key(supervised())


@pytest.mark.parametrize("same", ["seed=5", "optim.learning_rate=0.1", "loss=grpo", "record=all"])
def test_keys_that_only_the_main_run_uses_do_not_change_the_key(same: str) -> None:
    assert warm_start_key(supervised(same)) == warm_start_key(supervised())


class Sources:
    """The source files that the key is made of, one of them changed."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.changed = ""

    def __call__(self, path: Path) -> bytes:
        name = str(path.relative_to(REPO))
        self.read.add(name)
        return path.read_bytes() + b"# changed" * (name == self.changed)


def test_a_change_to_any_source_file_of_the_result_changes_the_key() -> None:
    sources = Sources()
    first = supervised("env=wiki-search", "model=tiny")
    keys = {warm_start_key(first, sources)}
    packages = ("rl/learner", "rl/model", "rl/sampling", "rl/rollouts", "losses")
    made_of = {
        *(str(f.relative_to(REPO)) for folder in packages for f in (REPO / folder).glob("*.py")),
        *(f"envs/wiki/{name}.py" for name in ("environment", "corpus", "facts", "retrieval")),
        *("envs/protocol.py", "envs/tools.py"),
    }
    assert made_of <= sources.read
    for number, name in enumerate(sorted(sources.read), 2):
        sources.changed = name
        keys.add(warm_start_key(first, sources))
        assert len(keys) == number, f"{name} changes nothing"


def test_other_source_files_and_environments_do_not_count() -> None:
    sources = Sources()
    warm_start_key(supervised(), sources)
    assert "envs/reverse_text.py" in sources.read
    strangers = ("rl/supervisor", "lab", "rl/runtime", "rl/weights", "envs/arithmetic")
    assert not [name for name in sources.read if name.startswith((*strangers, "envs/wiki"))]


def test_the_imports_of_a_users_environment_count_as_its_files(modules: Path) -> None:
    (modules / "knobs_env.py").write_text("import knobs_tools, numpy, rl.runtime.folder\n")
    (modules / "knobs_tools.py").write_text("from knobs_pack.inner import x\n")
    (modules / "knobs_pack").mkdir()
    (modules / "knobs_pack" / "__init__.py").touch()
    (modules / "knobs_pack" / "inner.py").write_text("from . import other\n")
    (modules / "knobs_pack" / "other.py").touch()
    names = [path.name for path in module_files(["knobs_env"], apart_from=["rl"])]
    assert names == ["knobs_env.py", "__init__.py", "inner.py", "other.py", "knobs_tools.py"]


def finished(folder: Path) -> RunFolder:
    """The folder of a supervised run that has exported its model."""
    run_folder = RunFolder(folder)
    export = run_folder.export_of(run_folder.checkpoint(8))
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    return run_folder


def test_the_result_can_be_kept_on_another_file_system(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not os.access(elsewhere, os.W_OK) or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is but one file system")
    with tempfile.TemporaryDirectory(dir=elsewhere) as cache:
        run_folder, target = finished(tmp_path / "warm"), Path(cache) / "kept"
        keep_result(run_folder, target)
        assert [path.name for path in Path(cache).iterdir()] == ["kept"]
        assert (target / "config.json").read_text() == "{}"
    assert not run_folder.path.exists()


def test_a_result_that_another_run_kept_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.mkdir()
    (target / "config.json").write_text("the other's")
    keep_result(finished(tmp_path / "warm"), target)
    assert (target / "config.json").read_text() == "the other's"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
