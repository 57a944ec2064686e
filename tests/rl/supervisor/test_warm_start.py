"""The supervised run that makes the policy a run starts from."""

import os
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
from rl.supervisor.warm_start import warm_start_key, warm_start_run
from tests.support.composing import REPO, composed
from tests.support.launching import wait_for


def supervised(*overrides: str) -> Run:
    recipe = composed(primary="warm_start")
    return warm_start_run(Run.of(composed(*overrides)), recipe, Path("somewhere/warm"))


def key_of(*overrides: str) -> str:
    return warm_start_key(supervised(*overrides), [])


def test_the_warm_start_takes_its_own_recipe_and_the_limits_of_the_run() -> None:
    recipe = {"corruption_rate": 0.25, "steps": 33, "batch_size": 7, "learning_rate": 0.02}
    chosen = [f"model.warm_start.{key}={value}" for key, value in recipe.items()]
    limits = ["max_time=2h", "max_seq_len=128", "trainer.logprob_chunk=9", "trainer.ranks=2"]
    off = ["trainer.compile=true", "trainer.profile=3", "trainer.checkpoint_every=5"]
    made = supervised(*chosen, *limits, *off, "seed=5")
    assert made.sampler["corruption_rate"] == 0.25
    assert (made.max_steps, made.group_size, made.batch_size, made.seed) == (33, 1, 7, 0)
    assert (made.optim["learning_rate"], made.optim["warmup_steps"]) == (0.02, 5)
    assert (made.max_time, made.max_seq_len, made.model["warm_start"]) == ("2h", 128, None)
    assert (made.output_dir, made.run_name) == ("somewhere", "warm")
    trainer = made.trainer.plain()
    assert [trainer[key] for key in ("compile", "profile", "checkpoint_every")] == [0] * 3
    assert (trainer["logprob_chunk"], trainer["ranks"]) == (9, 2)
    on_ray = supervised("cluster=ray", *limits, "trainer.num_threads=3", "model.warm_start.steps=3")
    assert (on_ray.trainer.ranks, on_ray.trainer.num_threads) == (1, None)
    assert on_ray.optim["warmup_steps"] == 3


def test_the_key_depends_on_what_changes_the_warm_start(monkeypatch) -> None:
    first = supervised()
    keys = [
        key_of(),
        key_of("model.warm_start.corruption_rate=0.25"),
        key_of("env.max_length=4"),
        key_of("trainer.max_grad_norm=9"),
        key_of(f"env.system_prompt='{'Be brief. ' * 30}'"),  # cannot be a path
        key_of("env.system_prompt='~Be brief.'"),
    ]
    assert key_of("seed=5", "trainer.ranks=4", "env.reward_weights.exact=0.5") == keys[0]
    for changed in ("none", "torch", "transformers", "deepspeed", "renderers"):
        monkeypatch.setattr(module, "version", lambda name, changed=changed: name == changed)
        keys.append(warm_start_key(first, []))
    assert len({*keys}) == len(keys)


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
    stamp = [[str(file), 6, file.stat().st_mtime_ns]]
    for key in ("eval_path", "corpus", "questions"):
        assert module._file_hash(f"dataset.{key}", str(file.parent)) == stamp
    assert module._file_hash("operators.0", str(file.parent)) == ""


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
    learns = {"envs/protocol.py", "envs/wiki/environment.py", "envs/wiki/corpus.py"}
    assert {*learns, *(str(path.relative_to(REPO)) for path in files)} <= read.keys()
    others = ("rl/supervisor", "lab", "rl/runtime", "rl/weights", "envs/arithmetic")
    assert not [name for name in read if name.startswith(others)]
    for number, name in enumerate(sorted(read), 2):
        keys.add(key(name))
        assert len(keys) == number, f"{name} changes nothing"


def finished(folder: Path) -> RunFolder:
    """The folder of a supervised run that has exported its model."""
    run_folder = RunFolder(folder)
    export = run_folder.export_of(run_folder.checkpoint(8))
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    return run_folder


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
