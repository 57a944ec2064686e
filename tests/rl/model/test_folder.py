"""A model's folder, read without loading it: links, damage, fingerprint, kind, sizes."""

import json
import shutil
import struct
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl.model.folder import check_teacher, check_trainable, copy_tokenizer, fingerprint
from rl.model.pretrained import check_files
from rl.model.shape import read_sizes, shape
from tests.support.scripted import tiny_model
from tests.support.tiny_policy import model_folder


def safetensors(path, values=b"\x00\x01\x02\x03"):
    header = {"w.weight": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + values)
    return path


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    safetensors(folder / "model.safetensors")
    return folder


def test_links_out_of_the_folder_are_not_copied(model, tmp_path):
    (tmp_path / "secret.json").write_text("key")
    (model / "leak.json").symlink_to(tmp_path / "secret.json")
    (model / "vocab.json").symlink_to(model / "tokenizer.json")
    kept = ["chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.model"]
    for name in (*kept, "model.safetensors.index.json", "pytorch_model.bin"):
        (model / name).write_text("theirs")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "generation_config.json").write_text("ours")  # as transformers has written it
    copy_tokenizer(model, copy)
    names = sorted(path.name for path in copy.iterdir())
    assert names == [*kept[:3], "tokenizer.json", "tokenizer.model", "vocab.json"]
    assert (copy / "generation_config.json").read_text() == "ours"
    assert not (copy / "vocab.json").is_symlink()


@pytest.mark.parametrize(
    ("snapshot", "is_followed"),
    [
        ("models--org--name/snapshots/abc", True),
        ("models--org--name/others/abc", False),
        ("mine/snapshots/abc", False),
    ],
)
def test_only_the_links_of_the_hubs_cache_are_followed(snapshot, is_followed, tmp_path):
    snapshot = tmp_path / snapshot
    blobs = snapshot.parents[1] / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "123").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    copy_tokenizer(snapshot, tmp_path)
    assert (tmp_path / "tokenizer.json").exists() == is_followed


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda _: b"<html>no</html>" * 9])
def test_a_file_that_was_cut_off_or_is_no_safetensors_is_named(damage, model):
    check_files(model)
    path = model / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors"):
        check_files(model)


def test_the_fingerprint_covers_weights_config_and_tokenizer_and_not_the_path(model, tmp_path):
    before = fingerprint(model)
    elsewhere = model.rename(tmp_path / "elsewhere")
    (elsewhere / "README.txt").write_text("x")
    assert fingerprint(elsewhere) == before
    safetensors(elsewhere / "model.safetensors", b"\x00\x01\x02\x04")
    assert fingerprint(elsewhere) != before
    safetensors(elsewhere / "model.safetensors")
    assert fingerprint(elsewhere) == before
    first = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    others = ("special_tokens_map.json", "added_tokens.json", "tokenizer.model")
    for name in (*first, *others, "generation_config.json"):
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


@pytest.mark.parametrize("vocab", [[["a", -1.0], ["b", -2.0]], {"a": 0, "b": 1}])
def test_a_token_of_the_vocabulary_needs_an_embedding(vocab, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (tmp_path / "config.json").write_text('{"vocab_size": 1}')
    with pytest.raises(ValueError, match=r"from 1 on \('b'\)"):
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


def test_sizes_of_a_model_without_weights_are_those_it_will_have(tmp_path):
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


def test_the_weights_that_are_there_are_counted_without_another_copy_of_them(tmp_path):
    folder = tiny_model(tmp_path)
    for name in ("model-1-of-2", "model-2-of-2", "consolidated"):
        tensors = {name: torch.zeros(3, 5), f"{name}.norm": torch.zeros(4)}
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
    assert read_sizes(folder).parameters == 3 * 19
    shards = {name: f"{name}.safetensors" for name in ("model-1-of-2", "model-2-of-2")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert read_sizes(folder).parameters == 2 * 19


@pytest.mark.parametrize("key", ["intermediate_size", "moe_intermediate_size"])
def test_sizes_that_differ_by_layer_are_not_guessed(key, tmp_path):
    config = json.loads((tiny_model(tmp_path) / "config.json").read_text())
    assert shape(config | {"text_config": None}) is not None
    assert shape(config | {key: [512, 1024]}) is None
