"""The supervised run that makes the policy a run starts from."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from rl.config.schema import Run
from rl.dry_call.child import DryCall
from rl.runtime.folder import RunFolder
from rl.supervisor import warm_start as module
from rl.supervisor.supervise import _Launch
from rl.supervisor.time_limit import TimeLimit
from rl.supervisor.warm_start import move_to_cache, warm_start_key, warm_start_run
from tests.support.composing import REPO, composed
from tests.support.launching import wait_for

LATE = """
from envs.protocol import Environment

class Own(Environment):
    def examples(self, split):
        return []

    def demonstrations(self, rng):
        import knobs_late
        yield []
"""


def supervised(*overrides: str) -> Run:
    recipe = composed(primary="warm_start")
    return warm_start_run(Run.of(composed(*overrides)), recipe, Path("somewhere/warm"))


def key_of(*overrides: str) -> str:
    return warm_start_key(supervised(*overrides), [])


def test_the_warm_start_uses_the_corruption_rate_of_the_model() -> None:
    recipe = {"corruption_rate": 0.25, "steps": 33, "batch_size": 7, "learning_rate": 0.02}
    chosen = [f"model.warm_start.{key}={value}" for key, value in recipe.items()]
    limits = ["max_time=2h", "max_seq_len=128", "trainer.logprob_chunk=9", "trainer.ranks=2"]
    off = [f"trainer.{key}=true" for key in ("compile", "debug")] + ["trainer.profile=3"]
    made = supervised(*chosen, *limits, *off, "trainer.checkpoint_every=5", "seed=5")
    assert made.sampler["_target_"] == "rl.sampling.demonstrations.DemonstrationSampler"
    assert made.sampler["corruption_rate"] == 0.25
    assert (made.max_steps, made.group_size, made.batch_size, made.seed) == (33, 1, 7, 0)
    assert (made.optim["learning_rate"], made.optim["warmup_steps"]) == (0.02, 5)
    assert (made.max_time, made.max_seq_len, made.model["warm_start"]) == ("2h", 128, None)
    assert (made.output_dir, made.run_name) == ("somewhere", "warm")
    trainer = made.trainer.plain()
    assert [trainer[key] for key in ("compile", "debug", "profile", "checkpoint_every")] == [0] * 4
    assert (trainer["logprob_chunk"], trainer["ranks"]) == (9, 2)
    on_ray = supervised("cluster=ray", *limits, "trainer.num_threads=3", "model.warm_start.steps=3")
    assert (on_ray.trainer.ranks, on_ray.trainer.num_threads) == (1, None)
    assert on_ray.optim["warmup_steps"] == 3


@pytest.mark.parametrize(
    "change",
    [
        *("model.warm_start.corruption_rate=0.25", "env.max_length=4", "trainer.max_grad_norm=9"),
        f"env.system_prompt='{'Be brief. ' * 30}'",  # cannot be a path
        "env.system_prompt='~Be brief.'",
    ],
)
def test_a_change_to_the_warm_start_changes_its_key(change: str) -> None:
    assert key_of(change) != key_of()


@pytest.mark.parametrize("path", ["data", "data/*.parquet", "data/part.parquet"])
def test_changed_data_change_the_key_of_a_folder_and_of_a_file_pattern(path, tmp_path) -> None:
    file = tmp_path / "data" / "part.parquet"
    file.parent.mkdir()
    keys = []
    # First the size changes, and then only the time.
    for time, text in ((0, "one"), (0, "one"), (0, "others"), (9, "edited")):
        file.write_text(text)
        os.utime(file, (time, time))
        keys.append(key_of("env=composed", f"env.dataset.path={tmp_path / path}"))
    assert keys[0] == keys[1]
    assert len({*keys}) == 3


def test_operators_that_look_like_paths_read_no_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    operators = "env.operators=['*', '+']"
    before = key_of("env=arithmetic", operators)
    (tmp_path / "new").touch()
    assert key_of("env=arithmetic", operators) == before


def test_keys_that_only_the_main_run_uses_do_not_change_the_key() -> None:
    same = ["seed=5", "optim.learning_rate=0.1", "loss=grpo", "record=all", "sync=shm"]
    same += ["client=tokens", "logger=tensorboard", "inference.replicas=2", "cluster=ray"]
    same += ["trainer.ranks=4", "trainer.wait_timeout=99", "max_time=1h", "output_dir=there"]
    same += ["run_name=other", "model.learning_rate=0.1", "model.max_tokens=9"]
    same += ["env.reward_weights.exact=0.5"]
    assert key_of(*same) == key_of()


def test_another_version_of_a_library_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first, keys = supervised(), set[str]()
    for changed in ("none", "torch", "transformers", "deepspeed", "renderers"):
        monkeypatch.setattr(module, "version", lambda name, changed=changed: name == changed)
        keys.add(warm_start_key(first, []))
    assert len(keys) == 5


def test_options_that_name_a_folder_of_data_or_a_file_are_hashed(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("text")
    stat = (tmp_path / "file").stat()
    of_folder = [[str(tmp_path / "file"), 4, stat.st_mtime_ns]]
    for key in ("path", "eval_path", "corpus", "questions"):
        assert module._file_hash(f"dataset.{key}", str(tmp_path)) == of_folder
    assert module._file_hash("dataset.other", str(tmp_path)) == ""
    monkeypatch.setenv("HOME", str(tmp_path))
    digest = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1"  # sha256 of "text"
    assert module._file_hash("other", "~/file") == digest


def test_a_change_to_a_file_that_learns_or_that_the_dry_call_imported_changes_the_key(
    monkeypatch,
) -> None:
    first = supervised("env=wiki-search", "model=tiny")
    with DryCall([first.plain()]) as dry_call:
        own_files = dry_call.files()
    read, unchanged = dict[str, bytes](), Path.read_bytes

    def key(changed: str = "") -> str:
        def content(path: Path) -> bytes:
            name = str(path.relative_to(REPO))
            read[name] = unchanged(path) + b"# changed" * (name == changed)
            return read[name]

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", content)
            return warm_start_key(first, own_files)

    keys = {key()}
    packages = ("rl/learner", "rl/model", "rl/sampling", "rl/rollouts", "losses")
    files = [path for folder in packages for path in (REPO / folder).glob("*.py")]
    wiki = {f"envs/wiki/{name}.py" for name in ("environment", "corpus", "facts", "index")}
    learns = {"envs/protocol.py", "envs/tools.py", *wiki}
    assert {*learns, *(str(path.relative_to(REPO)) for path in files)} <= read.keys()
    others = ("rl/supervisor", "lab", "rl/runtime", "rl/weights", "envs/arithmetic")
    assert not [name for name in read if name.startswith(others)]
    for number, name in enumerate(sorted(read), 2):
        keys.add(key(name))
        assert len(keys) == number, f"{name} changes nothing"


def test_a_module_that_an_expert_imports_late_is_one_of_its_files(modules, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("OFFBYONE_CACHE", str(modules / "cache"))
    (modules / "knobs_late.py").touch()
    (modules / "knobs_env.py").write_text(LATE)
    with DryCall([{**composed(), "env": {"_target_": "knobs_env.Own"}}]) as dry_call:
        names = {Path(file).name for file in dry_call.files()}
    assert {"knobs_env.py", "knobs_late.py"} <= names


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
        move_to_cache(run_folder, target)
        assert [path.name for path in Path(cache).iterdir()] == ["kept"]
        assert (target / "config.json").read_text() == "{}"
    assert not run_folder.path.exists()


HOLDER = """
import sys, time
from pathlib import Path
from rl.supervisor.warm_start import alone_with
with alone_with(Path(sys.argv[1]), lambda: None):
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_run_waits_for_the_same_warm_start_of_another_run_until_that_run_ends(tmp_path) -> None:
    def holder(seconds: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "kept"), seconds]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)

    first = holder("100")
    assert first.stdout is not None
    assert first.stdout.readline() == "locked\n"
    second = holder("0")
    assert second.stdout is not None
    waiting = "warm start: waiting for another run, which computes the same warm start\n"
    assert second.stdout.readline() == waiting
    assert not wait_for(lambda: second.poll() is not None, 1)
    first.kill()
    first.communicate()
    assert second.communicate(timeout=20)[0] == "locked\n"


def test_only_one_of_two_runs_computes_their_warm_start(monkeypatch, tmp_path, capsys) -> None:
    begun, launch_of = list[Path](), cast("Any", _Launch)

    def compute(_: Any, __: Run, ___: Run, folder: RunFolder, ____: DryCall) -> None:
        begun.append(folder.path)
        assert wait_for(lambda: "waiting for another run" in capsys.readouterr().out, 60)
        finished(folder.path)

    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    monkeypatch.setattr(_Launch, "_warm_start", compute)
    run, limit = Run.of(composed()), TimeLimit(None, RunFolder(tmp_path))

    def prepare(name: str) -> Path:
        launch = launch_of(RunFolder(tmp_path / name), None, None, limit, None)
        return launch.prepare_model(run, lambda name: composed(primary=name))

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(prepare, ("first", "second"))
    assert first == second
    assert (first / "config.json").is_file()
    assert len(begun) == 1


def test_a_result_that_another_run_kept_first_stays(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.mkdir()
    (target / "config.json").write_text("the other's")
    move_to_cache(finished(tmp_path / "warm"), target)
    assert (target / "config.json").read_text() == "the other's"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
