"""The output head alone (test_logprobs.py: in a model); N tokens, H hidden, V words."""

from functools import partial

import pytest
import torch

from rl.learner import output_head
from rl.learner.output_head import OutputHead

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
