"""A resumed run uses the model that it started from, and no other."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl.config.schema import ConfigError, Run
from rl.model.folder import fingerprint
from rl.runtime.folder import RunFolder
from rl.supervisor import base_model
from rl.supervisor.base_model import fetch_references, model_of
from tests.support.composing import composed


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
    mistyped = run.with_values({"reference.url": "http://localhost:80a0/v1"})
    with pytest.raises(ConfigError, match=r"cannot be reached .*InvalidURL.*correct this URL"):
        fetch_references(mistyped)
    ray = run.with_values({"cluster": composed("cluster=ray")["cluster"]})
    assert fetch_references(ray) == []


@pytest.mark.parametrize("content", ["/models/half", None])
def test_a_damaged_record_of_the_model_is_named(content, run_folder):
    record = run_folder.path / "model.txt"
    record.unlink() if content is None else record.write_text(content)
    with pytest.raises(ConfigError, match=r"model\.txt"):
        model_of(run_folder, pytest.fail)


def test_a_killed_start_leaves_the_old_record_of_the_model(run_folder, model, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run_folder.set_model(model / "other", "123")
    assert run_folder.initial_model() == model
