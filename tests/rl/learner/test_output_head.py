"""The output head alone (test_logprobs.py: in a model), layers with float32 gradients, optimizers.

N tokens, H hidden, V words. The learning rate of every step is worked by hand.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from rl.learner import output_head
from rl.learner.optim import AdamW, Muon
from rl.learner.output_head import OutputHead
from rl.learner.weight_gradients import use_float32_gradients

torch.set_num_threads(1)

N, H, V = 7, 3, 5


def inputs(dtype=torch.float64, n=N):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, V, (n,), generator=generator)
    hidden, weight, bias = draw(n, H), draw(V, H), draw(V)
    return [t.requires_grad_() for t in (hidden, weight, bias)], targets


def head(hidden, weight, bias, targets, chunk, **changes):
    options = {"temperature": 0.7, "dtype": hidden.dtype, "entropies": True, "gradient": True}
    given = {**options, "kl": False, "compiled": False, **changes}
    temperature, *others = given.values()
    return OutputHead.apply(hidden, weight, bias, targets, temperature, chunk, *others)


def test_two_words_by_hand():
    """Logits 0 and log 3 at temperature 0.5 are 0 and log 9: p = 0.1 and 0.9."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [torch.tensor(3.0).log()]], requires_grad=True)
    logprob, entropy, kl = head(
        hidden, weight, None, torch.tensor([1]), 1, temperature=0.5, kl=True
    )
    p = torch.tensor([0.1, 0.9])
    torch.testing.assert_close(logprob, p.log()[1:])
    torch.testing.assert_close(entropy, -(p * p.log()).sum().reshape(1))
    # KL(uniform || p) = (log(0.5 / 0.1) + log(0.5 / 0.9)) / 2 = log(0.5 / 0.3)
    torch.testing.assert_close(kl, torch.tensor([5 / 3]).log())
    (of_weight,) = torch.autograd.grad(logprob, weight, retain_graph=True)
    torch.testing.assert_close(of_weight, torch.tensor([[-0.2], [0.2]]))  # +-(1 - 0.9) / 0.5
    (of_weight,) = torch.autograd.grad(entropy, weight)
    # -p (log p + entropy) / 0.5; log 9 apart, so plus and minus 0.1 * 0.9 * log 9 / 0.5.
    slope = 0.09 * torch.tensor(9.0).log() / 0.5
    torch.testing.assert_close(of_weight, torch.stack([slope, -slope]).reshape(2, 1))


def test_the_kl_from_uniform_of_a_bfloat16_head_is_exact_for_its_logits():
    """The logits are rounded to bfloat16; all later numbers are float32."""
    (hidden, weight, bias), targets = inputs(torch.bfloat16, 300)
    kl = head(hidden, weight, bias, targets, 7, kl=True)[2]
    logits = torch.nn.functional.linear(hidden, weight, bias).detach().double() / 0.7
    expected = -logits.log_softmax(-1).mean(-1) - torch.tensor(V).log().double()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)


def test_in_bfloat16_no_chunk_is_rounded_away_from_the_gradient_of_the_weight():
    """300 tokens a chunk each, against one chunk: in bfloat16 their sum would be 1 % off."""
    (hidden, weight, bias), targets = inputs(torch.bfloat16, 300)
    for parameter in (weight, bias):
        parameter.grad_dtype = torch.float32
    found = []
    for chunk in (1, 300):
        logprobs, _ = head(hidden, weight, bias, targets, chunk, entropies=False)
        found.append(torch.autograd.grad(logprobs.sum(), (weight, bias)))
    assert {gradient.dtype for pair in found for gradient in pair} == {torch.float32}
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() / other.norm() < 1e-6


def test_a_float32_head_computes_on_bfloat16_numbers_as_if_they_were_float32():
    (hidden, weight, bias), targets = inputs(torch.bfloat16, 300)
    exact = [t.detach().float().requires_grad_() for t in (hidden, weight, bias)]
    found = head(hidden, weight, bias, targets, 7, dtype=torch.float32, kl=True)
    wide_hidden, wide_weight, wide_bias = exact
    expected = head(wide_hidden, wide_weight, wide_bias, targets, 7, kl=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    half = head(hidden, weight, bias, targets, 7)
    assert (half[0] - expected[0]).abs().max() > 1e-3  # what the plain head makes of them
    slopes = torch.linspace(-1, 2, 300)
    gradients, wanted = (
        torch.autograd.grad((slopes * logprobs - entropies).sum(), leaves)
        for (logprobs, entropies, _), leaves in ((found, (hidden, weight, bias)), (expected, exact))
    )
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("n", [N, 0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_compiled_head_computes_the_same_and_without_tokens_nothing(monkeypatch, with_bias, n):
    """Compiled without inductor, which takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    output_head._maybe_compiled.cache_clear()
    found = []
    for compiled in (False, True):
        (hidden, weight, bias), targets = inputs(n=n)
        bias = bias if with_bias else None
        outputs = head(hidden, weight, bias, targets, 3, kl=True, compiled=compiled)
        (outputs[0].exp().sum() + (outputs[1] * torch.arange(n)).sum()).backward()
        found.append([*outputs, *(t.grad for t in (hidden, weight, bias) if t is not None)])
    torch.testing.assert_close(found[0], found[1])
    assert bool(found[0][4].any()) == (n > 0)  # the gradient of the weight
    output_head._maybe_compiled.cache_clear()


TOKENS = torch.tensor([[1, 2, 3, 3], [4, 3, 2, 10]])


def test_in_float32_they_are_the_layers_they_were():
    plain = nn.Sequential(
        nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 4), nn.Linear(4, 3, False)
    )
    changed, slopes = copy.deepcopy(plain), torch.randn(2, 4, 3)
    use_float32_gradients(changed)
    assert list(changed.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(changed(TOKENS), plain(TOKENS), rtol=0, atol=0)
    for model in (changed, plain):
        (model(TOKENS) * slopes).sum().backward()
    found, expected = ([p.grad for p in model.parameters()] for model in (changed, plain))
    torch.testing.assert_close(found, expected)


def test_in_bfloat16_all_weights_get_the_sum_of_their_gradients_before_it_is_rounded():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)).bfloat16()
    use_float32_gradients(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    words, matrix = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    words.data[1] = torch.tensor([2.0, 3.0]).bfloat16()
    matrix.data = torch.eye(2).bfloat16()
    # Each small number is lost beside 1, and bfloat16 cannot represent the sum.
    slopes = torch.tensor([1.0, *[2**-9] * 65]).bfloat16()[:, None]
    (model(torch.ones(1, 66, dtype=torch.long)) * slopes).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    of_embedding, of_weight, of_bias = (gradient.tolist() for gradient in gradients)
    total = 1 + 65 * 2**-9
    assert of_embedding == [[0.0, 0.0], [total, total], [0.0, 0.0]]
    assert of_weight == [[2 * total, 3 * total]] * 2
    assert of_bias == [total, total]


KNOBS = {
    "learning_rate": 8.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0,
    "schedule": "constant", "warmup_steps": 0, "min_ratio": 0.25,
}  # fmt: skip
MUON_KNOBS = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adamw_ratio": 1.0}


def adamw(**changes):
    return AdamW(**{**KNOBS, **changes})


def muon(**changes):
    return Muon(**{**KNOBS, **MUON_KNOBS, **changes})


# cosine over 4 intervals: (1 + cos(k pi / 4)) / 2 = 1, 0.853553, 0.5, 0.146447, 0
TABLES = [
    ("constant", 4, [2, 4, 6, 8, 8, 8, 8]),
    ("linear", 2, [4, 8, 8, 6.5, 5, 3.5, 2]),
    ("cosine", 0, [8, 7.121320, 5, 2.878680, 2]),
    ("linear", 0, [8]),
    ("cosine", 3, [8 / 3, 16 / 3, 8]),
]


@pytest.mark.parametrize(("schedule", "warmup_steps", "rates"), TABLES)
def test_the_rate_of_every_step(schedule, warmup_steps, rates):
    optim = adamw(schedule=schedule, warmup_steps=warmup_steps)
    assert [optim.rate(k, len(rates)) for k in range(len(rates))] == pytest.approx(rates, rel=1e-6)
    assert adamw(schedule="cosine").rate(500, 100) == pytest.approx(2)  # beyond the last step


def test_weight_decay_leaves_vectors_alone_and_frozen_weights_out():
    module, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    given = [*module.parameters(), *frozen.parameters()]
    optimizer = adamw(weight_decay=0.5, learning_rate=0.125, beta1=0.5, eps=1e-3).optimizer(given)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {id(module.weight): 0.5, id(module.bias): 0.0}
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.125, (0.5, 0.99), 1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_gets_the_hidden_matrices_and_adamw_everything_else_that_trains(tied):
    words, hidden, frozen = (nn.Parameter(torch.zeros(4, 6)) for _ in range(3))
    head = words if tied else nn.Parameter(torch.zeros(4, 6))
    norm, experts = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 4, 3))
    frozen.requires_grad_(False)
    others = [words, norm, experts] + [head] * (not tied)
    optimizer = muon().optimizer([frozen, hidden, *others], [words, head])
    parts = {id(p): g["part"] for g in optimizer.param_groups for p in g["params"]}
    assert parts == {id(hidden): "muon", **dict.fromkeys(map(id, others), "adamw")}


def test_a_first_update_by_muon_is_orthogonal_and_as_long_as_adamws():
    """All singular values of the gradient are the same, so one number tells what becomes of it."""
    module = nn.Linear(4, 4, bias=False)
    before = module.weight.detach().clone()
    knobs = {"learning_rate": 0.5, "ns_steps": 1}
    optimizer = muon(**knobs).optimizer([module.weight])  # and no weight for AdamW
    module.weight.grad = 3 * torch.eye(4)
    optimizer.step()
    # Scaled to length 1 the identity has singular values of 1/2, which one iteration makes
    # 3.4445 / 2 - 4.7750 / 8 + 2.0315 / 32 = 1.188859. The factor of the shape is 0.2 * sqrt(4).
    length = 0.5 * 0.4 * 1.188859
    moved = before - module.weight.detach()
    torch.testing.assert_close(moved, length * torch.eye(4), rtol=0.01, atol=1e-6)
