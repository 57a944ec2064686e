"""The model that a run starts from: that of a resumed run, and the warm start of a new one."""

import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rl.config.schema import ConfigError, Run
from rl.dry_call.child import DryCall
from rl.model.folder import fingerprint
from rl.runtime.folder import RunFolder
from rl.supervisor import base_model
from rl.supervisor import warm_start as module
from rl.supervisor.base_model import fetch_references, model_of
from rl.supervisor.supervise import _Launch
from rl.supervisor.time_limit import TimeLimit
from rl.supervisor.warm_start import warm_start_key, warm_start_run
from tests.support.composing import REPO, composed
from tests.support.launching import wait_for


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run_folder(tmp_path, model):
    """Return the folder of a run that has saved a checkpoint."""
    run_folder = RunFolder(tmp_path / "run")
    checkpoint = run_folder.checkpoint(3)
    checkpoint.mkdir(parents=True)
    run_folder.state_of(checkpoint).write_text(json.dumps({"step": 3, "rollouts": {}}))
    run_folder.set_model(model, fingerprint(model))
    return run_folder


def test_a_resumed_run_prepares_only_a_deleted_model_again(tmp_path, run_folder, model):
    assert model_of(run_folder, pytest.fail) == model
    fresh = RunFolder(tmp_path / "fresh")
    fresh.path.mkdir()
    fresh.set_model(tmp_path / "of a start that failed", "123")
    assert model_of(fresh, lambda: model) == model
    again = model.rename(model.with_name("again"))
    assert model_of(run_folder, lambda: again) == again


@pytest.mark.parametrize("deleted", [True, False])
def test_another_model_is_refused(deleted, run_folder, model):
    newer = model.with_name("newer")  # as the hub or a newer warm start would give
    shutil.copytree(model, newer)
    (newer / "chat_template.jinja").write_text("{{ messages[-1] }}")
    shutil.rmtree(model)
    if not deleted:
        shutil.copytree(newer, model)
    with pytest.raises(ConfigError, match=r"or chat template in .* do not fit: restore .*/model"):
        model_of(run_folder, lambda: newer)


def test_every_teacher_is_looked_for_before_anything_starts(model):
    run = Run.of(composed("loss=distill", "reference=model", "reference.path=/"))
    local = {"_target_": "rl.learner.reference.local.FrozenModel", "revision": None}
    teachers = [{**local, "path": str(path)} for path in (model, "/nobody/here")]
    several = {"_target_": "rl.learner.reference.per_env.PerEnvironment", "teachers": teachers}
    (model / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"reference.path=/nobody/here does not exist"):
        fetch_references(run.with_values({"reference": several}))
    unread = Run.of(composed("loss=cispo")).with_values({"reference.path": "/nobody/here"})
    assert fetch_references(unread) == []


def test_a_teacher_that_cannot_be_reached_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(base_model, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"http://127.0.0.1:{busy.getsockname()[1]}/v1"
        teacher = ["reference=endpoint", f"reference.url={url}", "reference.model=b"]
        run = Run.of(composed("loss=distill", *teacher))
        assert fetch_references(run) == []
    with pytest.raises(
        ConfigError, match=rf"reference\.url={url} cannot be reached .*: start the server"
    ):
        fetch_references(run)
    ray = run.with_values({"cluster": composed("cluster=ray")["cluster"]})
    assert fetch_references(ray) == []


def test_a_damaged_record_of_the_model_is_named(run_folder):
    (run_folder.path / "model.txt").write_text("/models/half")
    with pytest.raises(ConfigError, match=r"model\.txt is damaged"):
        model_of(run_folder, pytest.fail)


def test_a_killed_start_leaves_the_old_record_of_the_model(run_folder, model, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run_folder.set_model(model / "other", "123")
    assert run_folder.initial_model() == model


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


def test_only_one_of_two_runs_computes_their_warm_start(monkeypatch, tmp_path, capsys) -> None:
    begun, launch_of = list[Path](), cast("Any", _Launch)

    def compute(_: Any, __: Run, ___: Run, folder: RunFolder, ____: DryCall) -> None:
        begun.append(folder.path)
        assert wait_for(lambda: "waiting for another run" in capsys.readouterr().out, 60)
        export = folder.export_of(folder.checkpoint(8))
        export.mkdir(parents=True)
        (export / "config.json").write_text("{}")

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
