"""Losses over candidates: tables by hand, one row per branch, and invariants of any distribution.

Probabilities are powers of 1/2, so every logarithm is a multiple of L = ln 2.
"""

import math
from functools import partial

import pytest
import torch

from losses.candidates import MIN_REST
from losses.forward_kl_topk import forward_kl_topk
from losses.jsd_topk import jsd_topk
from losses.reverse_kl_topk import reverse_kl_topk
from losses.tokens import Tokens

L, LOG_3_4 = math.log(2), math.log(3 / 4)
CUT = math.log(MIN_REST)
same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
LOSSES = {
    "forward": forward_kl_topk,
    "reverse": reverse_kl_topk,
    "between": partial(jsd_topk, mix=0.5),
    "mostly forward": partial(jsd_topk, mix=0.1),
}

# Rows of p, q, loss, d loss / d log p for two candidates. The rest is 1 minus their sum.
APART = (0.25, 0.25), (0.5, 0.25)  # rests: 1/2 and 1/4
EQUAL = (0.5, 0.125), (0.5, 0.125)
NO_REST = (0.5, 0.5), (0.5, 0.25)  # the policy's
NO_REF_REST = (0.5, 0.25), (0.5, 0.5)
NEITHER = (0.25, 0.75), (0.5, 0.5)

FORWARD = [
    # 1/2 L + 0 + 1/4 (-L);  -q + 1/4 p / (1/2)
    (*APART, L / 4, (-3 / 8, -1 / 8)),
    (*EQUAL, 0.0, (0.0, 0.0)),
    # 0 + 1/4 (-2L + L) + 1/4 (-2L - CUT);  the rest is a constant: -q
    (*NO_REST, -3 * L / 4 - CUT / 4, (-1 / 2, -1 / 4)),
    # 0 + 1/2 (-L + 2L) + 1e-6 (CUT + 2L);  -q + 1e-6 p / (1/4)
    (*NO_REF_REST, L / 2 + MIN_REST * (CUT + 2 * L), (2e-6 - 1 / 2, 1e-6 - 1 / 2)),
    # 1/2 (-L + 2L) + 1/2 (-L - log(3/4)), the rests are equal constants
    (*NEITHER, L / 2 + (-L - LOG_3_4) / 2, (-1 / 2, -1 / 2)),
]
REVERSE = [
    # 1/4 (-L) + 0 + 1/2 L;  p (log p/q - L)
    (*APART, L / 4, (-L / 2, -L / 4)),
    (*EQUAL, 0.0, (0.0, 0.0)),
    # 0 + 1/2 (-L + 2L) + 1e-6 (CUT + 2L);  the rest is a constant: p (log p/q + 1)
    (*NO_REST, L / 2 + MIN_REST * (CUT + 2 * L), (1 / 2, (L + 1) / 2)),
    # 0 + 1/4 (-2L + L) + 1/4 (-2L - CUT);  p (log p/q - (-2L - CUT))
    (*NO_REF_REST, -3 * L / 4 - CUT / 4, ((2 * L + CUT) / 2, (L + CUT) / 4)),
    (*NEITHER, 3 / 4 * LOG_3_4 + L / 2, ((1 - L) / 4, 3 / 4 * (LOG_3_4 + L + 1))),
]


def logs(p, q):
    return tuple(torch.tensor(x, dtype=torch.float64).log() for x in (p, q))


def given(log_p, log_q):
    """Tokens of which only the candidates matter: all else is NaN."""
    nan = torch.full((len(log_p),), math.nan, dtype=torch.float64)
    candidates = {"candidate_logprobs": log_p, "ref_candidate_logprobs": log_q}
    return Tokens.by_hand(nan, nan, nan, **candidates)


def differentiated(loss, log_p, log_q):
    """Return the result of a loss and its gradient in log p; log q must have none."""
    leaves = log_p.requires_grad_(), log_q.requires_grad_()
    out = loss(given(*leaves))
    gradient, none = torch.autograd.grad(out.loss.sum(), leaves, allow_unused=True)
    assert none is None  # a teacher learns nothing
    return out, gradient


@pytest.mark.parametrize(
    ("loss", "rows", "metric"),
    [(forward_kl_topk, FORWARD, "forward_kl"), (reverse_kl_topk, REVERSE, "reverse_kl")],
    ids=["forward", "reverse"],
)
def test_value_and_gradient_are_those_worked_by_hand(loss, rows, metric):
    p, q, values, gradients = zip(*rows, strict=True)
    out, gradient = differentiated(loss, *logs(p, q))
    same(out.loss, torch.tensor(values, dtype=torch.float64))
    same(gradient, torch.tensor(gradients, dtype=torch.float64))
    same(out.metrics[metric], out.loss.detach())
    assert not any(values.requires_grad for values in out.metrics.values())
    # The probabilities of the rests of APART and of NO_REST.
    expected = {"ref_rest": (1 / 4, 1 / 4), "rest": (1 / 2, MIN_REST)}
    (rest,) = expected.keys() & out.metrics.keys()
    same(out.metrics[rest][[0, 2]], torch.tensor(expected[rest], dtype=torch.float64))


def test_the_divergence_between_them_is_that_worked_by_hand():
    """mix 1/2: p, q, rest = (1/4, 1/4 | 1/2), (1/2, 1/4 | 1/4), m = (3/8, 1/4 | 3/8); then mix 1/4.

    mix KL(q || m) + (1 - mix) KL(p || m), and (1 - mix) p (log p/m - log p0/m0) as the gradient.
    """
    for mix, m in ((0.5, (3 / 8, 1 / 4, 3 / 8)), (0.25, (5 / 16, 1 / 4, 7 / 16))):
        p, q = (1 / 4, 1 / 4, 1 / 2), (1 / 2, 1 / 4, 1 / 4)
        value = sum(
            mix * b * math.log(b / c) + (1 - mix) * a * math.log(a / c)
            for a, b, c in zip(p, q, m, strict=True)
        )
        slope = [(1 - mix) * p[i] * (math.log(p[i] / m[i]) - math.log(p[2] / m[2])) for i in (0, 1)]
        out, gradient = differentiated(partial(jsd_topk, mix=mix), *logs([p[:2]], [q[:2]]))
        same(out.loss, torch.tensor([value], dtype=torch.float64))
        same(gradient, torch.tensor([slope], dtype=torch.float64))
        same(out.metrics["jsd"], out.loss.detach())


def random_batch():
    """The teacher's 4 likeliest of two random distributions over 12 tokens, at 200 places."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 200, 12, generator=random, dtype=torch.float64) * 2
    log_p, log_q = logits.log_softmax(-1)
    log_q, ids = log_q.topk(4)
    return given(log_p.gather(-1, ids), log_q)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_divergence_is_never_negative_zero_where_both_agree_and_finite_in_float32(loss):
    tokens = random_batch()
    assert loss(tokens).loss.min() > 0
    agreed = given(tokens.ref_candidate_logprobs, tokens.ref_candidate_logprobs)
    assert loss(agreed).loss.abs().max() < 1e-15
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert loss(given(empty, empty)).loss.shape == (0,)
    log_p = torch.tensor([[0.0, -120.0], [-1e-9, -60.0], [-0.7, -120.0]])
    log_q = torch.tensor([[-1e-9, -80.0], [-0.7, -0.7], [-0.7, -110.0]])  # the last: 0 in both
    out, gradient = differentiated(loss, log_p, log_q)
    assert out.loss.isfinite().all()
    assert gradient.isfinite().all()
