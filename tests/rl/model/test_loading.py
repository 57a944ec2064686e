"""Attention on a CPU: float32 inside, the same mask, and no trace of it in a written model."""

import json

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rl.model.loading import load_model, use_float32_attention, write_model
from tests.support import tiny_policy

torch.set_num_threads(1)
TOKENS = torch.arange(24).reshape(2, 12) % 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.model_folder(tmp_path_factory.mktemp("attention") / "model")


@pytest.mark.parametrize(
    ("dtype", "length", "inside"),
    [
        (torch.bfloat16, 512, torch.float32),
        (torch.bfloat16, 513, torch.bfloat16),
        (torch.float64, 12, torch.float64),
    ],
)
def test_short_rows_of_half_precision_are_attended_to_in_float32(
    folder, monkeypatch, dtype, length, inside
):
    model, seen = load_model(folder, torch.float32, 0).to(dtype), set()
    original = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *args, **kwargs):
        seen.add(query.dtype)
        return original(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    assert model(torch.arange(length)[None] % 50).logits.dtype == dtype
    assert seen == {inside}


def test_weights_that_are_missing_or_not_finite_are_refused_with_their_name(folder, tmp_path):
    model = load_model(folder, torch.float32, 0)
    model.model.norm.weight.data[1] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight contains NaN or infinity: use"):
        load_model(tmp_path, torch.float32, 0)
    state = model.state_dict()
    del state["model.layers.1.mlp.down_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks weights, such as model\.layers\.1\.mlp\.down"):
        load_model(tmp_path, torch.float32, 0)


def test_a_sliding_window_and_shared_heads_stay_what_they_are():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**sizes, **heads)).eval()
    expected = model(TOKENS).logits
    model.config.sliding_window = None
    without_window = model(TOKENS).logits
    model.config.sliding_window = 4
    use_float32_attention(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=0)
    half = model.bfloat16()(TOKENS).logits.float()
    assert (half - expected).abs().max() < 0.25 * (without_window - expected).abs().max()


def test_a_written_model_has_the_generation_config_of_its_source_and_not_our_attention(
    folder, tmp_path
):
    source, written = tmp_path / "source", tmp_path / "written"
    load_model(folder, torch.float32, 0).save_pretrained(source)
    # transformers loads this combination, but refuses to save it.
    (source / "generation_config.json").write_text(text := '{"temperature": 0.6, "top_p": 0.9}')
    model = load_model(source, torch.float32, 0)
    write_model(model, model.state_dict(), written, source)
    assert (written / "generation_config.json").read_text() == text
    assert "sdpa_float32" not in (written / "config.json").read_text()


@pytest.mark.parametrize("with_weights", [False, True])
def test_code_of_a_model_is_refused_without_a_question(tmp_path, monkeypatch, with_weights):
    monkeypatch.setattr("builtins.input", pytest.fail)
    monkeypatch.setattr("sys.stdin", None)
    names = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    config = {"model_type": "a-model-of-theirs", "auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code ran')")
    if with_weights:
        (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(tmp_path, torch.float32, 0)
