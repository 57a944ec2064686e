"""PretrainedModel: a checked local folder, or one line that says what to do."""

import json
import socket
from pathlib import Path

import httpx
import pytest
import yaml
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from rl.model.pretrained import ALLOW, IGNORE, PretrainedModel, local_folder

ROOT = Path(__file__).parents[3]
CONF = yaml.safe_load((ROOT / "conf/model/hf.yaml").read_text())
KNOBS = {key: value for key, value in CONF.items() if key not in ("_target_", "defaults")}
KNOBS["max_seq_len"] = 4096  # Hydra works it out


def model(path, **changes):
    return PretrainedModel(**{**KNOBS, "path": str(path), **changes})


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """Return a function that changes constants of huggingface_hub."""

    def change(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)

    return change


def test_a_complete_local_folder_is_used_where_it_lies(folder, tmp_path, monkeypatch):
    assert model(folder).prepare(tmp_path / "unused") == folder
    assert not (tmp_path / "unused").exists()
    monkeypatch.chdir(tmp_path)
    assert model("local").prepare(tmp_path / "unused") == folder  # a name on the hub it is not
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model("~/local").prepare(tmp_path / "unused") == folder


def test_a_folder_without_a_file_and_with_a_link_out_of_it_is_refused(folder, tmp_path):
    (folder / "tokenizer.json").rename(tmp_path / "private")
    with pytest.raises(ValueError, match=r"contains no tokenizer\.json: save the fast tokenizer"):
        model(folder).prepare(tmp_path)
    (folder / "tokenizer.json").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=r"tokenizer\.json is a link to .*private, outside its"):
        model(folder).prepare(tmp_path)
    (tmp_path / "step_000012" / "hf").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"12 is a ch.*: set model\.path=/.*/step_000012/hf,"):
        local_folder(f"{tmp_path}/step_000012", None, "model")


def test_missing_weights_and_more_positions_than_the_model_has_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"built for 4096 positions: use model\.max_seq_len=4096"):
        model(folder, max_seq_len=4097).prepare(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"contains no \*\.safetensors: finish the download"):
        model(folder).prepare(tmp_path)
    shards = {"a.weight": "model-1-of-2.safetensors", "b.weight": "model-2-of-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "model-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no model-2-of-2\.safetensors: finish the download"):
        model(folder).prepare(tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "a/b/c"])
def test_what_can_only_be_a_folder_is_not_looked_for_on_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.model.pretrained.snapshot_download", None)
    with pytest.raises(ValueError, match="does not exist: set model"):
        model(path).prepare(tmp_path)


def test_a_cached_download_is_used_without_a_network(folder, tmp_path, hub):
    # The cache as huggingface_hub lays it out.
    repo = tmp_path / "cache" / "models--some--model"
    for name in ("refs", "snapshots"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123abc")
    folder.rename(repo / "snapshots" / "0123abc")
    hub(ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=tmp_path / "cache")
    assert model("some/model").prepare(tmp_path) == repo / "snapshots" / "0123abc"


def test_a_hub_that_hangs_is_asked_once_and_named_with_the_ways_out(tmp_path, hub):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hub(ENDPOINT=endpoint, HF_HUB_ETAG_TIMEOUT=0.2, HF_HUB_CACHE=tmp_path / "cache")
        with pytest.raises(ValueError, match=f"{endpoint} does not answer: timed out") as caught:
            model("some/model").prepare(tmp_path)
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    ways_out = ("model.path=<local folder>", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE")
    assert all(word in str(caught.value) for word in ways_out)


def test_only_the_files_that_are_used_are_fetched():
    files = ["config.json", "model-1-of-2.safetensors", "chat_template.jinja", "tokenizer.model"]
    others = ["pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "README.md"]
    kept = filter_repo_objects([*files, *others], allow_patterns=ALLOW, ignore_patterns=IGNORE)
    assert list(kept) == files


@pytest.mark.parametrize(
    ("config_only", "reason"), [(False, None), (True, "HF_HUB_OFFLINE is set")]
)
def test_the_hub_is_asked_for_a_revision_and_for_no_other_files(
    config_only, reason, folder, monkeypatch
):
    asked = []
    monkeypatch.setattr("rl.model.pretrained.hub_problem", lambda: reason)
    monkeypatch.setattr(
        "rl.model.pretrained.snapshot_download",
        lambda path, **options: asked.append((path, options)) or str(folder),
    )
    if config_only:
        (folder / "model.safetensors").unlink()
    assert local_folder("some/model", "v2", "model", config_only=config_only) == folder
    options = {"revision": "v2", "allow_patterns": ["config.json"] if config_only else ALLOW}
    options |= {"ignore_patterns": IGNORE, "local_files_only": reason is not None}
    assert asked == [("some/model", options)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "some/model at revision v2 is a gated model: accept its terms"),
        (RepositoryNotFoundError, "the hub has no model some/model at revision v2"),
    ],
)
def test_a_refusal_by_the_hub_says_what_to_do(tmp_path, monkeypatch, error, message):
    def refuse(*args, **options):
        request = httpx.Request("GET", "https://hub")
        raise error("many\nlines", response=httpx.Response(404, request=request))

    monkeypatch.setattr("rl.model.pretrained.snapshot_download", refuse)
    with pytest.raises(ValueError, match=message):
        model("some/model", revision="v2").prepare(tmp_path)
