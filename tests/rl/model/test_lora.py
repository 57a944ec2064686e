"""LoRA as we attach it, compared with peft's own arithmetic."""

import copy
import dataclasses

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, Lfm2Config

from rl.learner.logprobs import PolicyModule
from rl.model.loading import load_model
from rl.model.lora import LoRA, active_module, adapter_recipes, full_recipes, without_adapter
from tests.support import tiny_policy

torch.set_num_threads(1)

PLAIN = LoRA(
    rank=4, alpha=12.0, dropout=0.0, target_modules="all-linear", modules_to_save=[], rslora=False
)
TOKENS = torch.tensor([[72, 101, 108, 108, 111, 257, 3]])
MASK = torch.tensor([[False, True, True, True, True, True, True]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.model_folder(tmp_path_factory.mktemp("adapter") / "model")


@pytest.fixture(scope="module")
def untied(tmp_path_factory, folder):
    """The same network with an output head of its own."""
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    where = tmp_path_factory.mktemp("untied") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model whose linear layers hold transposed weights, some of them square."""
    config = GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    where = tmp_path_factory.mktemp("gpt2")
    AutoModelForCausalLM.from_config(config).save_pretrained(where)
    return where


def adapted(folder, adapter=PLAIN, *, dtype=torch.float32, seed=0, trained=True, **knobs):
    """A model with an adapter, as it is after some training unless told otherwise."""
    model = load_model(folder, dtype, 0)
    model = dataclasses.replace(adapter, **knobs).attach(model, seed, "the base")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and trained and "lora_A" not in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * noise.to(parameter.dtype)
    return model.train()


def weights(recipes):
    return {recipe.name: recipe.make(*recipe.parts) for recipe in recipes}


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


SAVED = {"modules_to_save": ["norm", "o_proj"]}


@pytest.mark.parametrize(
    ("source", "knobs"),
    [("folder", {}), ("folder", {"rslora": True}), ("folder", SAVED), ("gpt2", {})],
)
def test_merged_weights_are_those_of_pefts_own_merge(source, knobs, request):
    folder = request.getfixturevalue(source)
    model = adapted(folder, **knobs)
    found = weights(full_recipes(model))
    twin = PeftModel(load_model(folder, torch.float32, 0), copy.copy(model.peft_config["default"]))
    twin.get_base_model().load_state_dict(model.state_dict())
    merged = dict(twin.merge_and_unload().named_parameters())
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name].detach(), rtol=1e-6, atol=1e-7)


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
    base, fresh = load_model(folder, torch.float32, 0), adapted(folder, trained=False)
    assert torch.equal(logits(base), logits(fresh))
    first, same, other = (
        weights(adapter_recipes(adapted(folder, seed=s, trained=False))) for s in (0, 0, 1)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_drawing_an_adapter_does_not_change_the_global_generator(folder):
    model = load_model(folder, torch.float32, 0)
    before = torch.get_rng_state()
    PLAIN.attach(model, 7, "")
    assert torch.equal(before, torch.get_rng_state())


def test_only_the_adapter_is_trained_and_has_the_models_dtype(folder):
    for dtype in (torch.float32, torch.bfloat16):
        model = adapted(folder, dtype=dtype)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert len(trained) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
        assert all(".lora_" in name and p.dtype == dtype for name, p in trained.items())


def test_all_linear_means_every_linear_layer_but_the_head(untied):
    names = {name.rsplit(".", 3)[1] for name in weights(adapter_recipes(adapted(untied)))}
    assert {name.rsplit(".", 2)[0] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_rank_alpha_and_rslora_reach_peft(folder):
    config = adapted(folder, rank=8, alpha=24.0, rslora=True).peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 24.0, True)


def test_target_modules_choose_the_layers(folder):
    model = adapted(folder, target_modules=["q_proj", "layers.1.mlp.down_proj"])
    found = weights(adapter_recipes(model))
    assert {name.removeprefix("base_model.model.model.layers.") for name in found} == {
        f"{layer}.lora_{matrix}.weight"
        for layer in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")
        for matrix in "AB"
    }


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"target_modules": ["q_proj", "query"]},
            "adapter.target_modules contains query, which the model does not have: choose from "
            "[a-z]+",  # names, not the numbers of layers
        ),
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


def test_the_adapter_is_on_again_after_an_error(folder):
    model = adapted(folder)
    on = logits(model)
    with pytest.raises(KeyError), without_adapter(model):
        raise KeyError
    assert torch.equal(logits(model), on)


def test_nothing_to_switch_off_is_an_error(folder):
    with (
        pytest.raises(ValueError, match="no adapter to disable"),
        without_adapter(load_model(folder, torch.float32, 0)),
    ):
        pass


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return tiny_policy.model_folder(folder, num_experts=4, experts_per_token=2)


def test_the_adapter_of_a_mixture_leaves_its_experts_frozen_and_its_names_unchanged(mixture):
    model = adapted(mixture)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.split(".")[-2] for name in weights(adapter_recipes(model))} == {"lora_A", "lora_B"}
    assert {name.split(".")[-3] for name in weights(adapter_recipes(model))} == attention
    plain = {
        name: p.detach() for name, p in load_model(mixture, torch.float32, 0).named_parameters()
    }
    merged = weights(full_recipes(model))
    assert merged.keys() == plain.keys()
    changed = {name.split(".")[-2] for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == attention


def test_an_adapter_that_names_experts_is_refused_with_what_to_do(mixture):
    for named in (["q_proj", "up_proj"], ["layers.0.mlp.up_proj"]):
        with pytest.raises(ValueError, match="target_modules names up_proj, which are matrices"):
            adapted(mixture, target_modules=named)
    assert weights(adapter_recipes(adapted(mixture, target_modules=["q_proj"])))


def test_a_dense_model_with_convolutions_gets_adapters_in_its_mlps():
    config = Lfm2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model = PLAIN.attach(AutoModelForCausalLM.from_config(config), 0, "the base")
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert sum(name.endswith((".w1", ".w2", ".w3")) for name in adapted) == 6
