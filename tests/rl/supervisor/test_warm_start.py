"""The supervised run that makes the policy a run starts from."""

import os
import tempfile
from pathlib import Path

import pytest

from rl.config.schema import Run
from rl.run.folder import RunFolder
from rl.supervisor.sources import module_files
from rl.supervisor.warm_start import keep_result, warm_start_key, warm_start_run
from tests.support.composing import REPO, composed


def supervised(*overrides: str) -> Run:
    recipe = composed("loss=sft", "sampler=demonstrations")
    return warm_start_run(Run(**composed(*overrides)), recipe, Path("somewhere/warm"))


def test_it_imitates_an_expert_who_errs_as_often_as_the_model_says() -> None:
    made = supervised(
        "model.warm_start.corruption_rate=0.25", "model.warm_start.steps=33", "seed=5"
    )
    assert made.sampler["_target_"] == "rl.sampling.demonstrations.DemonstrationSampler"
    assert made.sampler["corruption_rate"] == 0.25
    assert (made.max_steps, made.group_size, made.seed) == (33, 1, 0)


def test_supervised_training_by_itself_learns_from_an_expert_without_fault() -> None:
    assert composed("loss=sft", "sampler=demonstrations")["sampler"]["corruption_rate"] == 0


@pytest.mark.parametrize(
    "change",
    ["model.warm_start.corruption_rate=0.25", "model.warm_start.steps=33", "env.max_length=4"],
)
def test_another_lesson_is_another_policy(change: str) -> None:
    assert warm_start_key(supervised(change)) != warm_start_key(supervised())


@pytest.mark.parametrize("text", ["Be brief. " * 30, "~Be brief."])
def test_a_system_prompt_that_can_be_no_path_is_another_lesson_too(text: str) -> None:
    assert warm_start_key(supervised(f"env.system_prompt='{text}'")) != warm_start_key(supervised())


@pytest.mark.parametrize("same", ["seed=5", "optim.learning_rate=0.1", "loss=grpo", "record=all"])
def test_every_run_after_the_same_lesson_starts_from_the_same_policy(same: str) -> None:
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


def test_a_change_to_any_file_that_makes_the_policy_makes_another() -> None:
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


def test_other_files_and_other_environments_leave_the_policy_as_it_is() -> None:
    sources = Sources()
    warm_start_key(supervised(), sources)
    assert "envs/reverse_text.py" in sources.read
    strangers = ("rl/supervisor", "rl/report", "rl/cli", "rl/run", "rl/weights", "envs/arithmetic")
    assert not [name for name in sources.read if name.startswith((*strangers, "envs/wiki"))]


def test_what_an_environment_of_the_users_imports_belongs_to_it(modules: Path) -> None:
    (modules / "knobs_env.py").write_text("import knobs_tools, numpy, rl.run.folder\n")
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


def test_the_result_is_kept_on_another_file_system(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not os.access(elsewhere, os.W_OK) or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is but one file system")
    with tempfile.TemporaryDirectory(dir=elsewhere) as cache:
        run_folder, target = finished(tmp_path / "warm"), Path(cache) / "kept"
        keep_result(run_folder, target)
        assert [path.name for path in Path(cache).iterdir()] == ["kept"]
        assert (target / "config.json").read_text() == "{}"
    assert not run_folder.path.exists()


def test_a_result_that_another_run_has_kept_meanwhile_is_left(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.mkdir()
    (target / "config.json").write_text("the other's")
    keep_result(finished(tmp_path / "warm"), target)
    assert (target / "config.json").read_text() == "the other's"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
