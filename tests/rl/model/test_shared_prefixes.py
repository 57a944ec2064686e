"""Rows that share their beginnings: packed, and computed with the result of plain rows."""

import copy
import logging

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rl.learner.critic import ValueModule
from rl.learner.logprobs import PolicyModule
from rl.learner.weight_gradients import use_float32_gradients
from rl.model.loading import enable_gradient_checkpointing, load_model, use_float32_attention
from rl.model.shared_prefixes import pack, share_prefixes, shares_prefixes, states_before
from tests.support import tiny_policy

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}  # fmt: skip
FAMILIES = {
    "qwen2": transformers.Qwen2Config(**SIZES),
    "experts": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "learned positions": transformers.GPT2Config(**GPT2),
    "sliding window": transformers.MistralConfig(**SIZES, sliding_window=4),
    "some layers with a window": transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}


def padded(rows):
    """Return token ids and masks of rows, given as pairs of token ids and scored positions."""
    width = max(len(ids) for ids, _ in rows)
    token_ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros(token_ids.shape, np.bool_)
    for i, (ids, scored) in enumerate(rows):
        token_ids[i, : len(ids)] = ids
        mask[i, list(scored)] = True
    return token_ids, mask


some_rows = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=12).flatmap(
        lambda ids: st.tuples(st.just(ids), st.sets(st.integers(1, len(ids) - 1)))
    ),
    min_size=1,
    max_size=12,
)


@given(some_rows, st.sampled_from([0, 300]))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_every_token_stands_in_a_leaf_behind_the_tokens_of_its_row(rows, length):
    rows = [([7] * length + ids, {length + place for place in scored}) for ids, scored in rows]
    packed = pack(*padded(rows))
    needed = [ids[: max(scored, default=1)] for ids, scored in rows]
    assert len(packed.token_ids) == len({tuple(r[: i + 1]) for r in needed for i in range(len(r))})
    if not length:  # a row that is the beginning of another has no leaf of its own
        shorter = {tuple(row[:i]) for row in needed for i in range(len(row))}
        ends = {tuple(row) for row in needed} - shorter
        assert sum(len(index) for index, _ in packed.leaves) == len(ends)
    # What the attention sees at each place of the outputs: the tokens up to it in its leaf.
    seen = [
        row[: column + 1]
        for index, first in packed.leaves
        for row in index
        for column in range(first, len(row))
    ]
    assert [seen[place][-1] for place in packed.copies] == list(range(len(packed.token_ids)))
    read = iter(packed.before)
    for ids, scored in rows:
        for place in sorted(scored):
            behind = seen[packed.copies[next(read)]]
            assert packed.token_ids[behind].tolist() == ids[:place]
            assert packed.positions[behind].tolist() == list(range(place))
    assert next(read, None) is None


def forked(vocab, seed=0, count=14, length=0):
    """Return padded rows with common prompts, several turns, equal rows and one without a turn.

    `length`: tokens at the beginning of all rows.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocab, 9) for _ in range(2)]
    rows = []
    for i in range(count):
        ids = np.concatenate([prompts[i % 2], rng.integers(3, 5, rng.integers(2, 14))])
        rows.append((ids, [9, *range(11, len(ids))] if i else []))
    rows.append(rows[-1])
    token_ids, mask = map(torch.tensor, padded(rows))
    common = torch.full((len(rows), length), 9)
    return torch.cat([common, token_ids], 1), torch.cat([common < 0, mask], 1)


def value_and_gradient(module, *inputs, **options):
    """Return the outputs, and the gradient of a sum in which all outputs have other weights."""
    module.zero_grad()
    outputs = module(*inputs, **options)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    total = sum(
        (torch.linspace(-1, 2, each.numel(), dtype=each.dtype) * each.flatten()).sum()
        for each in outputs
        if each.is_floating_point()
    )
    total.backward()
    gradient = {n: p.grad.double() for n, p in module.named_parameters() if p.requires_grad}
    return [each.detach() for each in outputs], gradient


def both_ways(model, make):
    """Return a module of plain rows and one of shared prefixes, with the same weights."""
    shared = copy.deepcopy(model)
    share_prefixes(shared)
    assert shares_prefixes(shared)
    assert not shares_prefixes(model)
    return make(model), make(shared)


@pytest.mark.parametrize(("is_critic", "length"), [(False, 0), (False, 300), (True, 0)])
def test_value_and_gradient_are_those_of_plain_rows(tmp_path, is_critic, length):
    model = tiny_policy.exact_model(tiny_policy.model_folder(tmp_path))
    token_ids, mask = forked(200, length=length)
    candidates = torch.stack([token_ids[mask] + 1, token_ids[mask] + 9], -1)

    def make(model):
        if not is_critic:
            return PolicyModule(model, chunk=7, entropy_gradient=True, kl_from_uniform=True)
        module = ValueModule(model)
        nn.init.normal_(module.head.weight, generator=torch.Generator().manual_seed(0))
        return module

    inputs = (token_ids, mask) if is_critic else (token_ids, mask, 0.8)
    options = {} if is_critic else {"entropies": True, "candidates": candidates}
    plain, shared = both_ways(model, make)
    expected, wanted = value_and_gradient(plain, *inputs, **options)
    found, gradient = value_and_gradient(shared, *inputs, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "how", "length"),
    [
        *((family, "plain", 0) for family in FAMILIES),
        ("some layers with a window", "plain", 260),
        ("some layers with a window", "checkpointing", 0),
        ("some layers with a window", "lora", 0),
    ],
)
def test_every_family_of_models_computes_what_plain_rows_compute(family, how, length):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        FAMILIES[family], dtype=torch.float32
    ).train()
    use_float32_attention(model)
    if how == "lora":
        model = tiny_policy.ADAPTER.attach(model, 0, "base")

    def make(model):
        if how == "checkpointing":
            enable_gradient_checkpointing(model)
        return PolicyModule(model, chunk=100)

    plain, shared = both_ways(model, make)
    inputs = (*forked(50, length=length), 0.8)
    (expected, _), wanted = value_and_gradient(plain, *inputs, entropies=True)
    (found, _), gradient = value_and_gradient(shared, *inputs, entropies=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert tiny_policy.relative_error(gradient, wanted) < 1e-5


@pytest.mark.parametrize("length", [0, 520])  # 520: the kernel of bfloat16
def test_bfloat16_is_as_far_from_float32_arithmetic_as_plain_rows(tmp_path, length):
    model = load_model(tiny_policy.model_folder(tmp_path, "bfloat16"), torch.bfloat16, 0)
    inputs = (*forked(200, count=8 if length else 40, length=length), 0.8)

    def make(model):
        module = PolicyModule(model, chunk=100)
        use_float32_gradients(module)
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
        return module

    exact = PolicyModule(copy.deepcopy(model).float(), chunk=100)
    expected, wanted = value_and_gradient(exact, *inputs, entropies=True)
    far = []
    for module in both_ways(model, make):
        outputs, gradient = value_and_gradient(module, *inputs, entropies=True)
        error = (outputs[0] - expected[0]).abs().mean()
        far.append((error, tiny_policy.relative_error(gradient, wanted)))
    (plain_value, plain_gradient), (value, gradient) = far
    assert value < 1.2 * plain_value
    assert gradient < 1.2 * plain_gradient


NEXT = transformers.Qwen3NextConfig(
    **SIZES, head_dim=16, layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (NEXT, "layers of the type linear_attention"),
        (transformers.GPT2Config(**GPT2 | {"attn_pdrop": 0.1}), "dropout"),
        (transformers.LlamaConfig(**SIZES, attention_dropout=0.1), "dropout"),
        (transformers.MixtralConfig(**SIZES, router_jitter_noise=0.1), "adds noise"),
        (
            transformers.BloomConfig(
                vocab_size=50, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0
            ),
            "attention cannot be replaced",
        ),
    ],
    ids=["linear attention", "dropout", "attention dropout", "jitter", "own attention"],
)
def test_a_model_that_cannot_share_exactly_computes_plain_rows_and_says_why(caplog, config, reason):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    expected = states_before(model.eval().base_model, *forked(50))
    with caplog.at_level(logging.WARNING, "rl"):
        share_prefixes(model.train())
    (record,) = [record for record in caplog.records if record.name.startswith("rl.")]
    assert "trainer.share_prefixes=true has no effect, because" in record.getMessage()
    assert reason in record.getMessage()
    assert model.training
    assert not shares_prefixes(model)
    found = states_before(model.eval().base_model, *forked(50))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
