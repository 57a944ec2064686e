"""The folder of a model: found or downloaded, checked, copied, its fingerprint and its sizes."""

import json
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl.model.folder import check_teacher, check_trainable, copy_tokenizer, fingerprint
from rl.model.pretrained import ALLOW, IGNORE, PretrainedModel, local_folder
from rl.model.shape import read_sizes
from tests.support.scripted import tiny_model
from tests.support.tiny_policy import model_folder

CONF = yaml.safe_load((Path(__file__).parents[3] / "conf/model/hf.yaml").read_text())
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
    with pytest.raises(ValueError, match="a/b/c does not exist: set model"):
        model("a/b/c").prepare(tmp_path)  # no name on the hub
    (tmp_path / "step_000012" / "hf").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"12 is a ch.*: set model\.path=/.*/step_000012/hf,"):
        local_folder(f"{tmp_path}/step_000012", None, "model")


def test_missing_weights_and_more_positions_than_the_model_has_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"built for 4096 positions: use model\.max_seq_len=4096"):
        model(folder, max_seq_len=4097).prepare(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{")  # cut off
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors"):
        model(folder).prepare(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"contains no \*\.safetensors: finish the download"):
        model(folder).prepare(tmp_path)
    shards = {"a.weight": "model-1-of-2.safetensors", "b.weight": "model-2-of-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "model-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no model-2-of-2\.safetensors: finish the download"):
        model(folder).prepare(tmp_path)


def test_a_hub_that_hangs_is_named_with_the_ways_out(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cache = {"ENDPOINT": endpoint, "HF_HUB_ETAG_TIMEOUT": 0.2, "HF_HUB_CACHE": tmp_path}
        for name, value in cache.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        with pytest.raises(ValueError, match=f"{endpoint} does not answer: timed out") as caught:
            model("some/model").prepare(tmp_path)
    assert "set model.path=<local folder>, set HF_HOME to a cache" in str(caught.value)


def test_the_hub_is_asked_for_a_revision_and_for_no_other_files(folder, monkeypatch):
    asked, reasons = [], iter([None, "HF_HUB_OFFLINE is set"])
    monkeypatch.setattr("rl.model.pretrained.hub_problem", lambda: next(reasons))
    monkeypatch.setattr(
        "rl.model.pretrained.snapshot_download",
        lambda path, **options: asked.append((path, options)) or str(folder),
    )
    for config_only in (False, True):
        assert local_folder("some/model", "v2", "model", config_only=config_only) == folder
    options = {"revision": "v2", "ignore_patterns": IGNORE}
    online = options | {"allow_patterns": ALLOW, "local_files_only": False}
    offline = options | {"allow_patterns": ["config.json"], "local_files_only": True}
    assert asked == [("some/model", online), ("some/model", offline)]
    files = ["config.json", "model-1-of-2.safetensors", "chat_template.jinja", "tokenizer.model"]
    others = ["pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "README.md"]
    kept = filter_repo_objects([*files, *others], allow_patterns=ALLOW, ignore_patterns=IGNORE)
    assert list(kept) == files


def test_a_refusal_by_the_hub_says_what_to_do(tmp_path, monkeypatch):
    def refuse(*args, **options):
        request = httpx.Request("GET", "https://hub")
        raise GatedRepoError("many\nlines", response=httpx.Response(404, request=request))

    monkeypatch.setattr("rl.model.pretrained.snapshot_download", refuse)
    with pytest.raises(ValueError, match="m at revision v2 is a gated model: accept its terms"):
        model("some/m", revision="v2").prepare(tmp_path)


def test_of_links_only_those_inside_the_folder_or_the_hubs_cache_are_followed(folder, tmp_path):
    (tmp_path / "secret.json").write_text("key")
    (folder / "leak.json").symlink_to(tmp_path / "secret.json")
    (folder / "vocab.json").symlink_to(folder / "tokenizer.json")
    kept = ["chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.model"]
    for name in (*kept, "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_text("theirs")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "generation_config.json").write_text("ours")  # as transformers has written it
    copy_tokenizer(folder, copy)
    names = sorted(path.name for path in copy.iterdir())
    assert names == [*kept[:3], "tokenizer.json", "tokenizer.model", "vocab.json"]
    assert (copy / "generation_config.json").read_text() == "ours"
    assert not (copy / "vocab.json").is_symlink()
    for repo, copied in (("models--org--name", ["tokenizer.json"]), ("mine", [])):
        snapshot, copy = tmp_path / repo / "snapshots" / "abc", tmp_path / "copies" / repo
        for made in (snapshot, copy, tmp_path / repo / "blobs"):
            made.mkdir(parents=True)
        (tmp_path / repo / "blobs" / "123").write_text("{}")
        (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
        copy_tokenizer(snapshot, copy)
        assert [path.name for path in copy.iterdir()] == copied


def test_the_fingerprint_covers_weights_config_and_tokenizer_and_not_the_path(folder, tmp_path):
    before = fingerprint(folder)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    (elsewhere / "README.txt").write_text("x")
    assert fingerprint(elsewhere) == before
    first = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    others = ("special_tokens_map.json", "added_tokens.json", "tokenizer.model")
    for name in (*first, *others, "generation_config.json", "model.safetensors"):
        changed = shutil.copytree(elsewhere, tmp_path / name)
        (changed / name).write_text('{"a": 1}')
        assert fingerprint(changed) != before, name


def refused(said):
    return nullcontext() if said is None else pytest.raises(ValueError, match=said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "a BertForMaskedLM, which is not a causal"),
        ({"architectures": ["T5"], "is_encoder_decoder": True}, "contains a T5, which is"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\), which"),
        # Any other model is left to transformers.
        ({}, None),
        ({"architectures": ["GPT2LMHeadModel"]}, None),
    ],
)
def test_a_model_of_a_wrong_kind_is_refused(config, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(said):
        check_trainable(tmp_path)


@pytest.mark.parametrize(
    ("special", "template", "file", "usable"),
    [
        (True, "<|user|>", "chat_template.jinja", True),
        (False, "<|user|>", "chat_template.jinja", False),
        (True, "<|user|><image>", "chat_template.jinja", False),
        (True, "<|user|><image>", "tokenizer_config.json", False),
    ],
)
def test_only_special_tokens_that_no_chat_uses_need_no_embedding(
    special, template, file, usable, tmp_path
):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 2}}')
    added = [{"id": 2, "content": "<image>", "special": special}]
    tokenizer = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / file).write_text(json.dumps({"chat_template": template}))
    with refused(None if usable else r"from 2 on \('<image>'\)"):
        check_trainable(tmp_path)


PLAIN = {"vocab": {"a": 0, "aa": 1}, "merges": ["a a"]}
ANOTHER = "has another tokenizer than the policy"


@pytest.mark.parametrize(
    ("tokenizer", "added", "num_logits", "said"),
    [
        (PLAIN, 2, 3, None),
        (PLAIN | {"merges": [["a", "a"]]}, 2, 3, None),  # the same in the newer notation
        (PLAIN, 2, 2, "has 2 logits, so it cannot score 1 tokens of the policy, such as '<x>'"),
        (PLAIN | {"merges": []}, 2, 3, ANOTHER),
        (PLAIN | {"vocab": {"a": 0, "ab": 1}}, 2, 3, ANOTHER),
        (PLAIN, 3, 4, ANOTHER),
    ],
)
def test_a_teacher_needs_the_tokenizer_and_the_logits_of_the_policy(
    tokenizer, added, num_logits, said, tmp_path
):
    teacher, policy = tmp_path / "teacher", tmp_path / "policy"
    for folder, model, number in ((teacher, tokenizer, added), (policy, PLAIN, 2)):
        folder.mkdir()
        content = {"model": model, "added_tokens": [{"content": "<x>", "id": number}]}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "config.json").write_text(json.dumps({"vocab_size": num_logits}))
    with refused(said):
        check_teacher(teacher, policy)


def test_parameters_are_counted_in_the_weights_or_are_those_that_a_model_will_have(tmp_path):
    dense = tiny_model(tmp_path / "dense")
    mixture = model_folder(tmp_path / "mixture", num_experts=4, experts_per_token=2)
    for folder in (dense, mixture):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        sizes = read_sizes(folder)
        # Norms are not worth counting.
        assert sizes.parameters == sum(p.numel() for p in model.parameters() if p.ndim > 1)
        assert sizes.linear_layers() == {
            name.rpartition(".")[2]: tuple(reversed(module.weight.shape))
            for name, module in model.model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
    assert (sizes.expert, sizes.inner) == (32, 64)  # width of one expert, and of those of a token
    for name, size in (("one", 3), ("two", 5), ("consolidated", 8)):  # the last repeats the others
        save_file({"a": torch.zeros(size)}, dense / f"{name}.safetensors", {"format": "pt"})
    assert read_sizes(dense).parameters == 3 + 5 + 8
    shards = {name: f"{name}.safetensors" for name in ("one", "two")}
    (dense / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert read_sizes(dense).parameters == 3 + 5
