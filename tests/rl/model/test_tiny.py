"""TinyModel: a folder that transformers, vLLM and our renderer read alike."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl.model.loading import load_model, write_model
from rl.model.tiny import TinyModel, TinyMoE, byte_tokenizer
from rl.model.tokenizer import Tokenizer, load_renderer

CONF = yaml.safe_load((Path(__file__).parents[3] / "conf/model/tiny.yaml").read_text())
CONF["dtype"] = "bfloat16"  # the default depends on the machine
KNOBS = {key: value for key, value in CONF.items() if key != "_target_"}

TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CONVERSATIONS = {  # role, content, number of tool calls
    "turns": [("user", "☃", 0), ("assistant", "b", 0), ("system", "late", 0), ("user", "", 0)],
    "tools": [
        *[("system", "S", 0), ("user", "1 + 2", 0), ("assistant", "", 2), ("tool", "3", 0)],
        *[("tool", "4", 0), ("assistant", "so", 1), ("tool", "3", 0)],
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return TinyModel(**KNOBS).prepare(tmp_path_factory.mktemp("tiny") / "deep" / "model")


@pytest.fixture(scope="module")
def auto_tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_builds_a_small_qwen3_from_it(folder):
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 828_800
    assert str(model.dtype) == "torch.bfloat16"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (config.vocab_size, config.max_position_embeddings) == (320, 2048)
    assert config.rope_parameters["rope_theta"] == 100.0
    assert (config.initializer_range, config.rms_norm_eps) == (0.08, 1e-6)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [258, 256]


@pytest.mark.parametrize(
    "text",
    [" a  b\n\n", "ünïcødé e\u0301 漢字 🙂\u200b", "<|im_start|>x<|im_end|><think>", "\x00"],
)
def test_transformers_tokenizes_as_we_do(folder, auto_tokenizer, text):
    ours = Tokenizer(folder)
    assert ours.encode(text) == auto_tokenizer.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == auto_tokenizer.decode(ours.encode(text)) == text
    assert ours.decode([0x80, 97]) == auto_tokenizer.decode([0x80, 97])
    assert auto_tokenizer.eos_token_id == ours.eos_token_id
    assert auto_tokenizer.pad_token_id == ours.pad_token_id


@pytest.mark.parametrize("which", CONVERSATIONS)
def test_the_chat_template_says_what_the_renderer_says(folder, auto_tokenizer, which):
    messages = [
        {"role": role, "content": content, **({"tool_calls": [TOOL_CALL] * calls} if calls else {})}
        for role, content, calls in CONVERSATIONS[which]
    ]
    tools = [TOOL] if which == "tools" else None
    ours = load_renderer(folder, "qwen3").render_ids(
        messages, tools=tools, add_generation_prompt=True
    )
    text = auto_tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert Tokenizer(folder).decode(ours) == text


def test_a_prepared_folder_is_kept_an_empty_one_filled_and_a_foreign_one_refused(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    TinyModel(**KNOBS).prepare(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    TinyModel(**{**KNOBS, "learning_rate": 1.0, "max_tokens": 7}).prepare(folder)
    for size in (64, 256):  # with 256, the file has the same number of bytes
        with pytest.raises(ValueError, match=r"config\.json differs"):
            TinyModel(**{**KNOBS, "hidden_size": size}).prepare(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    longer = TinyModel(**{**KNOBS, "max_seq_len": 5000}).prepare(tmp_path / "longer")
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, longer)]
    assert [config["max_position_embeddings"] for config in configs] == [2048, 5000]


def test_a_users_tokenizer_needs_the_tokens_of_the_chat_format(tmp_path):
    own, path = byte_tokenizer(), tmp_path / "own.json"
    knobs = {**KNOBS, "tokenizer": path}
    with pytest.raises(ValueError, match=r"model\.tokenizer=.*own\.json does not exist"):
        TinyModel(**knobs).prepare(tmp_path / "m")
    own.add_tokens([f"word{i}" for i in range(55)])  # 256 bytes, 9 tokens of the format, 55 words
    own.save(str(path))
    folder = TinyModel(**knobs).prepare(tmp_path / "m")
    assert Tokenizer(folder).encode("word54") == [319]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 320  # no padding
    path.write_text(path.read_text().replace("</think>", "</thought>"))
    with pytest.raises(ValueError, match=r"own\.json lacks </think>: add"):
        TinyModel(**knobs).prepare(tmp_path / "m")


def test_a_mixture_saves_its_experts_one_by_one_and_loads_them_again(tmp_path):
    knobs = {**KNOBS, "num_layers": 1, "num_experts": 2, "experts_per_token": 1}
    folder = TinyMoE(**knobs).prepare(tmp_path / "model")
    model = load_model(folder, torch.bfloat16, 0)
    config = model.config
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (2, 1, True)
    write_model(model, dict(model.named_parameters()), tmp_path / "saved", folder)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    gate_up = model.model.layers[0].mlp.experts.gate_up_proj
    up = saved["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert torch.equal(up, gate_up[1, len(up) :])
    again = load_model(tmp_path / "saved", torch.bfloat16, 1)
    assert torch.equal(again.model.layers[0].mlp.experts.gate_up_proj, gate_up)


def test_a_killed_start_leaves_no_partial_file(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        TinyModel(**KNOBS).prepare(tmp_path)
    assert not (tmp_path / "config.json").exists()
    monkeypatch.undo()
    TinyModel(**KNOBS).prepare(tmp_path)
