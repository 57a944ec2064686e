"""Logprobs in chunks are those of one log_softmax over all logits; N tokens, V words.

The last tests are of the sets of tokens that top_p, top_k and min_p kept; S kept tokens.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.learner.logprobs import PolicyModule, kept_logprob
from rl.model.loading import load_model
from tests.support import tiny_policy

torch.set_num_threads(1)

VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.model_folder(tmp_path_factory.mktemp("logprobs") / "model")


@pytest.fixture(scope="module")
def model(folder):
    """With a bias in the output head, which no model of ours has."""
    model = tiny_policy.exact_model(folder)
    bias = torch.linspace(-1.0, 1.0, VOCAB, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


@pytest.fixture(scope="module")
def rows():
    """(token ids, chosen) of rows of several lengths; the third has no chosen token."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (9, 2, 5, 13):
        token_ids = torch.randint(0, 256, (length,), generator=generator)
        chosen = torch.rand(length, generator=generator) < 0.6
        chosen[0], chosen[-1] = False, True
        made.append((token_ids, chosen & (length != 5)))
    return made


def stacked(rows, extra=0):
    width = max(len(token_ids) for token_ids, _ in rows) + extra
    token_ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (ids, chosen) in enumerate(rows):
        token_ids[i, : len(ids)], mask[i, : len(ids)] = ids, chosen
    return token_ids, mask


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def plain(model, rows, temperature):
    """Row after row, without padding, from all logits."""
    logprobs, entropies = [], []
    for token_ids, chosen in rows:
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        full = torch.log_softmax(logits / temperature, -1)
        own = full.gather(-1, token_ids[1:, None])[:, 0]
        logprobs.append(own[chosen[1:]])
        entropies.append(-(full.exp() * full).sum(-1)[chosen[1:]])
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize(
    ("temperature", "entropy_gradient", "chunk", "extra"),
    [(1.0, False, 1, 0), (0.6, True, 4, 3), (0.6, False, 1000, 11)],
)
def test_logprobs_entropies_and_gradients_are_those_of_plain_log_softmax(
    model, rows, temperature, entropy_gradient, chunk, extra
):
    token_ids, mask = stacked(rows, extra)
    module = PolicyModule(model, chunk=chunk, entropy_gradient=entropy_gradient)
    found = module(token_ids, mask, temperature, entropies=True)
    expected = plain(model, rows, temperature)
    assert len(expected[0]) == mask.sum() > 10
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[1].requires_grad == entropy_gradient
    weights = torch.linspace(-1.0, 2.0, len(expected[0]), dtype=torch.float64)
    ours, theirs = (
        gradients(model, (weights * logprobs - entropy_gradient * 0.3 * entropies).sum())
        for logprobs, entropies in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours["lm_head.bias"].abs().max() > 0.01
    if entropy_gradient:
        alone = gradients(model, (weights * plain(model, rows, temperature)[0]).sum())
        assert max(float((ours[name] - alone[name]).abs().max()) for name in ours) > 0.01


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "options", "is_plain"),
    [
        ("granite", {"logits_scaling": 8.0}, False),
        ("granite", {"logits_scaling": 1.0}, True),
        ("cohere", {"logit_scale": 0.0625}, False),
        ("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}, False),
        ("minicpm3", {}, False),  # it scales the hidden states instead
        ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 64}, True),  # the head is narrower
    ],
)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(kind, options, is_plain):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    with nullcontext() if is_plain else pytest.raises(ValueError, match="CausalLM are not the out"):
        module = PolicyModule(model.eval().bfloat16(), chunk=4)
        token_ids, mask = torch.arange(1, 9)[None], torch.arange(8)[None] > 0
        expected = model(token_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        expected = expected.gather(-1, token_ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(module(token_ids, mask, 1.0)[0], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_the_weights_at_both_ends(folder, tied):
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    found = {id(parameter) for parameter in PolicyModule(model, chunk=4).embeddings}
    named = {name for name, parameter in model.named_parameters() if id(parameter) in found}
    ends = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert named == ends


def test_a_float32_head_has_the_logprobs_of_float32_logits(folder, rows):
    model, (token_ids, mask) = load_model(folder, torch.bfloat16, 0), stacked(rows)
    hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1][mask[:, 1:]]
    full = (hidden.float() @ model.lm_head.weight.float().T / 0.6).log_softmax(-1)
    expected = full.gather(-1, token_ids[mask][:, None])[:, 0]
    exact, rounded = (
        PolicyModule(model, chunk=4, head_dtype=dtype)(token_ids, mask, 0.6)[0]
        for dtype in (torch.float32, None)
    )
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    assert (rounded - expected).abs().max() > 1e-4


def kept_with(token_ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return sets [N, 6] that contain each token [N]; every fourth token has none."""
    kept = torch.full((len(token_ids), 6), -1)
    generator = torch.Generator().manual_seed(seed)
    for i, token in enumerate(token_ids.tolist()):
        others = torch.randperm(250, generator=generator)
        size = (0, 1, 3, 6)[i % 4]
        kept[i, :size] = torch.cat([torch.tensor([token]), others[others != token]])[:size]
    return kept


def test_the_probability_of_a_set_by_hand():
    # p = 0.5, 0.2, 0.3; the sets {0, 2}, {1} and none: 0.8, 0.2 and all
    p = torch.tensor([[0.5, 0.3], [0.2, 0.5], [0.5, 0.5]], dtype=torch.float64)
    logprobs = p.log().requires_grad_()
    found = kept_logprob(torch.tensor([[0, 2], [1, -1], [-1, -1]]), logprobs)
    torch.testing.assert_close(found.exp(), torch.tensor([0.8, 0.2, 1.0], dtype=torch.float64))
    found.sum().backward()
    # d log(0.5 + 0.3) / d log 0.5 = 0.5 / 0.8
    expected = torch.tensor([[0.625, 0.375], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize(("chunk", "own_temperature"), [(3, True), (1000, False)])
def test_with_sets_value_and_gradient_are_those_of_masked_logits(folder, chunk, own_temperature):
    model = tiny_policy.exact_model(folder)
    token_ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[:, 0] = mask[1, 5:] = False
    own = token_ids[mask]
    kept, candidates = kept_with(own), torch.stack([(own + 3) % 256, (own + 9) % 256], -1)
    steps = torch.linspace(0.5, 1.5, len(own), dtype=torch.float64)[:, None]
    temperature = steps if own_temperature else 0.7
    weights = torch.linspace(-1, 2, len(own), dtype=torch.float64)

    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1][mask[:, 1:]] / temperature
    full = logits.log_softmax(-1)
    expected = tiny_policy.among(logits, kept).gather(-1, own[:, None])[:, 0]
    plain = torch.autograd.grad((weights * expected).sum(), list(model.parameters()))
    module = PolicyModule(model, chunk=chunk, kl_from_uniform=True)
    scored = module(token_ids, mask, temperature, entropies=True, candidates=candidates, kept=kept)
    logprobs, entropies, kl, of_candidates = scored
    torch.testing.assert_close(logprobs, expected, rtol=1e-10, atol=1e-10)
    # All other numbers are those of the full distribution.
    torch.testing.assert_close(of_candidates, full.gather(-1, candidates))
    torch.testing.assert_close(entropies, -(full.exp() * full).sum(-1))
    assert not kl.requires_grad
    torch.testing.assert_close(kl, -full.mean(-1) - math.log(full.shape[1]))
    found = torch.autograd.grad((weights * logprobs).sum(), list(model.parameters()))
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)

    ignored = module(token_ids, mask, temperature)[0]
    has_set = kept[:, 0] >= 0
    assert ((logprobs - ignored)[has_set] > 1).all()
    torch.testing.assert_close(logprobs[~has_set], ignored[~has_set], rtol=0, atol=0)
    # A reference may have fewer logits than the policy, whose padding ids vLLM may keep.
    unknown = torch.full((len(kept), 1), module.head.out_features)
    same = module(token_ids, mask, temperature, kept=torch.cat([kept, unknown], -1))[0]
    torch.testing.assert_close(same, logprobs)
