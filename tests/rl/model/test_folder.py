"""A model's folder, read without loading it: links, damage, a fingerprint, the kind of model."""

import json
import struct
from contextlib import nullcontext

import pytest

from rl.model.folder import (
    check_teacher,
    check_trainable,
    copy_tokenizer,
    damaged_weight_file,
    fingerprint,
)


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
    ("repository", "parent", "is_followed"),
    [
        ("models--org--name", "snapshots", True),
        ("models--org--name", "others", False),
        ("mine", "snapshots", False),
    ],
)
def test_only_the_links_of_the_hubs_cache_are_followed(repository, parent, is_followed, tmp_path):
    repository = tmp_path / repository
    snapshot = repository / parent / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    copy_tokenizer(snapshot, tmp_path)
    assert (tmp_path / "tokenizer.json").exists() == is_followed


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: content[:3],
        lambda content: b"",
        lambda content: struct.pack("<Q", 2**62) + content[8:],
        lambda content: content.replace(b'"w', b"\xff\xff"),
        lambda content: b"<html>not found</html>" * 9,
    ],
)
def test_a_file_that_was_cut_off_or_is_no_safetensors_is_named(damage, model):
    assert damaged_weight_file(model) is None
    path = model / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert damaged_weight_file(model) == "model.safetensors"


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
        content = (elsewhere / name).read_text() if (elsewhere / name).exists() else None
        (elsewhere / name).write_text('{"a": 1}')
        assert fingerprint(elsewhere) != before, name
        (elsewhere / name).write_text(content) if content else (elsewhere / name).unlink()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        *(
            ({"architectures": [kind]}, f"contains a {kind}, which is not a causal")
            for kind in (
                *("BertForMaskedLM", "XForSequenceClassification", "XForTokenClassification"),
                *("XForQuestionAnswering", "XForSpeechSeq2Seq", "XForImageClassification"),
            )
        ),
        (
            {"architectures": ["T5Model"], "is_encoder_decoder": True},
            "contains a T5Model, which is",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\), which"),
    ],
)
def test_a_model_of_a_wrong_kind_is_refused(config, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        check_trainable(tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["GPT2LMHeadModel"]}]
)
def test_any_other_is_left_to_transformers(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_trainable(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    ("special", "template", "usable"),
    [(True, "<|user|>", True), (False, "<|user|>", False), (True, "<|user|><image>", False)],
)
def test_only_special_tokens_that_no_chat_uses_need_no_embedding(
    special, template, usable, file, tmp_path
):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 2}}')
    added = [{"id": 2, "content": "<image>", "special": special}]
    tokenizer = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / file).write_text(json.dumps({"chat_template": template}))
    with nullcontext() if usable else pytest.raises(ValueError, match=r"from 2 on \('<image>'\)"):
        check_trainable(tmp_path)


@pytest.mark.parametrize("vocab", [[["a", -1.0], ["b", -2.0]], {"a": 0, "b": 1}])
def test_a_token_of_the_vocabulary_needs_an_embedding(vocab, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (tmp_path / "config.json").write_text('{"vocab_size": 2}')
    check_trainable(tmp_path)
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
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        check_teacher(teacher, policy)
