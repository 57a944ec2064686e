"""LoRA compared with peft's own arithmetic; loaded and written models; attention on a CPU."""

import copy
import dataclasses
import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from rl.learner.logprobs import PolicyModule
from rl.model.folder import copy_tokenizer
from rl.model.loading import load_model, use_float32_attention, write_model
from rl.model.lora import (
    active_module,
    adapter_recipes,
    full_recipes,
    without_adapter,
    write_adapter,
)
from rl.model.pretrained import local_folder
from tests.support import tiny_policy
from tests.support.launching import ROOT

torch.set_num_threads(1)

PLAIN = dataclasses.replace(tiny_policy.ADAPTER, alpha=12.0)
TOKENS = torch.tensor([[72, 101, 108, 108, 111, 257, 3]])
MASK = torch.tensor([[False, True, True, True, True, True, True]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.model_folder(tmp_path_factory.mktemp("adapter") / "model")


@pytest.fixture(scope="module")
def untied(tmp_path_factory, folder):
    """The same network with an output head of its own."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    where = tmp_path_factory.mktemp("untied") / "model"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        where
    )
    return where


def adapted(folder, *, dtype=torch.float32, seed=0, trained=True, **knobs):
    """A model with an adapter, as it is after some training unless told otherwise."""
    model = load_model(folder, dtype, 0)
    model = dataclasses.replace(PLAIN, **knobs).attach(model, seed, "the base")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and trained and "lora_A" not in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * noise.to(parameter.dtype)
    return model.train()


def weights(recipes):
    return {recipe.name: recipe.make(*recipe.parts) for recipe in recipes}


def test_the_printed_command_merges_a_checkpoint_into_a_model_that_starts_a_run(folder, tmp_path):
    hf, base, text = tmp_path / "hf", tmp_path / "base", (ROOT / "docs/everyday.md").read_text()
    model: Any = adapted(folder, modules_to_save=["norm"], rslora=True).eval()
    load_model(folder, torch.float32, 0).save_pretrained(base)
    model.peft_config["default"].base_model_name_or_path = str(base)
    write_adapter(model, weights(adapter_recipes(model)), hf)
    copy_tokenizer(folder, hf)
    with pytest.raises(ValueError, match="contains only an adapter: run `") as refused:
        local_folder(str(hf), None, "model")
    command = shlex.split(str(refused.value).split("`")[1])
    assert all(line.strip("; ") in text for line in command[2].split("; "))
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True)
    merged = local_folder(str(tmp_path / "merged"), None, "model")
    whole: Any = load_model(merged, torch.float32, 0)
    torch.testing.assert_close(whole(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0)
    given = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 256}
    assert torch.equal(whole.generate(TOKENS, **given), model.generate(TOKENS, **given))


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


@pytest.mark.parametrize(
    ("source", "knobs"),
    [("tiny", {"rslora": True, "modules_to_save": ["norm", "o_proj"]}), ("gpt2", {})],
)
def test_merged_weights_are_those_of_pefts_own_merge(source, knobs, folder, tmp_path):
    if source == "gpt2":  # its linear layers hold transposed weights, some of them square
        config = transformers.GPT2Config(
            vocab_size=300, n_embd=8, n_layer=1, n_head=2, n_positions=16
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder := tmp_path)
    model = adapted(folder, **knobs)
    found = weights(full_recipes(model))
    twin = PeftModel(load_model(folder, torch.float32, 0), copy.copy(model.peft_config["default"]))
    twin.get_base_model().load_state_dict(model.state_dict())
    merged = dict(twin.merge_and_unload().named_parameters())
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name].detach(), rtol=1e-6, atol=1e-7)


def test_an_export_keeps_the_buffers_that_a_checkpoint_has(tmp_path):
    config = transformers.Glm4MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    bias = model.get_buffer(name := "model.layers.1.mlp.gate.e_score_correction_bias")
    bias.copy_(torch.arange(8.0))
    model.save_pretrained(tmp_path / "source")
    model = PLAIN.attach(model, 0, "the base")
    write_model(model, weights(full_recipes(model)), tmp_path, tmp_path / "source")
    torch.testing.assert_close(load_model(tmp_path, torch.float32, 0).get_buffer(name), bias)


def test_a_merge_in_bfloat16_rounds_once(folder):
    model = adapted(folder, dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    layer = model.model.layers[0].mlp.up_proj
    update = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double() * 3
    exact = layer.base_layer.weight.double() + update
    merged = weights(full_recipes(model))["model.layers.0.mlp.up_proj.weight"]
    assert merged.dtype == torch.bfloat16
    wrong = merged != exact.bfloat16()
    assert wrong.float().mean() < 0.001  # float32 may fall on the other side of a tie
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_fresh_adapter_changes_nothing_and_is_drawn_from_the_seed(folder):
    base = load_model(folder, torch.float32, 0)
    expected, before = logits(base), torch.get_rng_state()
    assert torch.equal(logits(PLAIN.attach(base, 7, "")), expected)
    assert torch.equal(before, torch.get_rng_state())
    first, same, other = (
        weights(adapter_recipes(adapted(folder, seed=s, trained=False))) for s in (0, 0, 1)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_only_the_matrices_of_the_chosen_layers_are_trained_in_the_models_dtype(untied):
    """The output head is not among all-linear."""
    model = adapted(untied, dtype=torch.bfloat16, rank=8, alpha=24.0, rslora=True)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    attention = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    linear = attention | {f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    assert trained.keys() == {
        f"model.layers.{layer}.{name}.lora_{matrix}.default.weight"
        for layer in range(2)
        for name in linear
        for matrix in "AB"
    }
    assert {p.dtype for p in trained.values()} == {torch.bfloat16}
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 24.0, True)
    model = adapted(untied, target_modules=["layers.1.mlp.down_proj"])
    assert weights(adapter_recipes(model)).keys() == {
        f"base_model.model.model.layers.1.mlp.down_proj.lora_{matrix}.weight" for matrix in "AB"
    }


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        # The choices are names, not the numbers of layers.
        ({"target_modules": ["q_proj", "query"]}, "target_modules contains query, .* from [a-z]+"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "contains embed_tokens, an embedding"),
        ({"modules_to_save": ["score"]}, "adapter.modules_to_save contains score, which the model"),
        ({"modules_to_save": ["lm_head"]}, "contains lm_head, but embedding"),
        ({"modules_to_save": ["embed_tokens"]}, "contains embed_tokens, but embedding"),
    ],
)
def test_names_without_a_module_and_copies_of_tied_weights_are_refused(folder, knobs, said):
    with pytest.raises(ValueError, match=said):
        adapted(folder, **knobs)


def test_an_adapted_head_is_refused_and_a_saved_one_works(untied):
    with pytest.raises(ValueError, match=r"leave lm_head out of adapter\.target_modules"):
        PolicyModule(adapted(untied, target_modules=["lm_head", "q_proj"]), chunk=4)
    model = adapted(untied, modules_to_save=["lm_head"])
    module = PolicyModule(model, chunk=4)
    logprobs, _ = module(TOKENS, MASK, 1.0)
    expected = torch.log_softmax(logits(model)[0, :-1], -1).gather(-1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs.detach(), expected)
    with without_adapter(model):
        assert module.head is model.lm_head.original_module
    assert module.head is active_module(model.lm_head) is model.lm_head.modules_to_save["default"]


def test_the_adapter_of_a_mixture_leaves_its_experts_frozen_and_its_names_unchanged(tmp_path):
    mixture = tiny_policy.model_folder(tmp_path, num_experts=4, experts_per_token=2)
    model = adapted(mixture)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.split(".")[-3] for name in weights(adapter_recipes(model))} == attention
    plain = dict(load_model(mixture, torch.float32, 0).named_parameters())
    merged = weights(full_recipes(model))
    assert merged.keys() == plain.keys()
    changed = {name.split(".")[-2] for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == attention
    with pytest.raises(ValueError, match="target_modules names up_proj, which are matrices"):
        adapted(mixture, target_modules=["q_proj", "layers.0.mlp.up_proj"])


def test_a_dense_model_with_convolutions_gets_adapters_in_its_mlps():
    config = transformers.Lfm2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model = PLAIN.attach(transformers.AutoModelForCausalLM.from_config(config), 0, "the base")
    layers = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert sum(name.endswith((".w1", ".w2", ".w3")) for name in layers) == 6


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


def test_a_fresh_bfloat16_model_keeps_its_rotary_frequencies_in_float32(folder, tmp_path):
    fresh = load_model(folder, torch.bfloat16, 0)
    fresh.save_pretrained(tmp_path)
    for name, expected in load_model(tmp_path, torch.bfloat16, 1).named_buffers():
        torch.testing.assert_close(fresh.get_buffer(name), expected, rtol=0, atol=0)


def test_a_sliding_window_and_shared_heads_stay_what_they_are():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads)).eval()
    tokens = torch.arange(24).reshape(2, 12) % 7
    expected = model(tokens).logits
    model.config.sliding_window = None
    without_window = model(tokens).logits
    model.config.sliding_window = 4
    use_float32_attention(model)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=0)
    half = model.bfloat16()(tokens).logits.float()
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
