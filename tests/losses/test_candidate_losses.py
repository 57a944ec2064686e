"""Losses over candidates: tables by hand, one row per branch, and invariants of any distribution.

Probabilities are powers of 1/2, so every logarithm is a multiple of L = ln 2.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from losses.candidates import MIN_REST, candidate_distributions
from losses.forward_kl_topk import forward_kl_topk
from losses.jsd_topk import jsd_topk
from losses.reverse_kl_topk import reverse_kl_topk
from losses.tokens import TokenLoss, Tokens

L = math.log(2)
CUT = math.log(MIN_REST)
same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
LOSSES: dict[str, Callable[[Tokens], TokenLoss]] = {
    "forward": forward_kl_topk,
    "reverse": reverse_kl_topk,
    "between": partial(jsd_topk, mix=0.5),
    "mostly forward": partial(jsd_topk, mix=0.1),
}
every_loss = pytest.mark.parametrize("loss", LOSSES)

# Rows of p, q, loss, d loss / d log p for two candidates. The rest is 1 minus their sum.
Pair = tuple[float, float]
Row = tuple[Pair, Pair, float, Pair]
APART: tuple[Pair, Pair] = (0.25, 0.25), (0.5, 0.25)  # rests: 1/2 and 1/4
EQUAL: tuple[Pair, Pair] = (0.5, 0.125), (0.5, 0.125)
NO_REST: tuple[Pair, Pair] = (0.5, 0.5), (0.5, 0.25)  # the policy's
NO_REF_REST: tuple[Pair, Pair] = (0.5, 0.25), (0.5, 0.5)
NEITHER: tuple[Pair, Pair] = (0.25, 0.75), (0.5, 0.5)

FORWARD: list[Row] = [
    # 1/2 L + 0 + 1/4 (-L);  -q + 1/4 p / (1/2)
    (*APART, L / 4, (-3 / 8, -1 / 8)),
    (*EQUAL, 0.0, (0.0, 0.0)),
    # 0 + 1/4 (-2L + L) + 1/4 (-2L - CUT);  the rest is a constant: -q
    (*NO_REST, -3 * L / 4 - CUT / 4, (-1 / 2, -1 / 4)),
    # 0 + 1/2 (-L + 2L) + 1e-6 (CUT + 2L);  -q + 1e-6 p / (1/4)
    (*NO_REF_REST, L / 2 + MIN_REST * (CUT + 2 * L), (2e-6 - 1 / 2, 1e-6 - 1 / 2)),
    # 1/2 (-L + 2L) + 1/2 (-L - log(3/4)), the rests are equal constants
    (*NEITHER, L / 2 + (-L - math.log(0.75)) / 2, (-1 / 2, -1 / 2)),
]
REVERSE: list[Row] = [
    # 1/4 (-L) + 0 + 1/2 L;  p (log p/q - L)
    (*APART, L / 4, (-L / 2, -L / 4)),
    (*EQUAL, 0.0, (0.0, 0.0)),
    # 0 + 1/2 (-L + 2L) + 1e-6 (CUT + 2L);  the rest is a constant: p (log p/q + 1)
    (*NO_REST, L / 2 + MIN_REST * (CUT + 2 * L), (1 / 2, (L + 1) / 2)),
    # 0 + 1/4 (-2L + L) + 1/4 (-2L - CUT);  p (log p/q - (-2L - CUT))
    (*NO_REF_REST, -3 * L / 4 - CUT / 4, ((2 * L + CUT) / 2, (L + CUT) / 4)),
    (
        *NEITHER,
        -L / 4 + 0.75 * (math.log(0.75) + L),
        ((1 - L) / 4, 0.75 * (math.log(0.75) + L + 1)),
    ),
]


def candidates(p: Sequence[Pair], q: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor(x, dtype=torch.float64).log() for x in (p, q))  # pyright: ignore


def given(log_p: Tensor, log_q: Tensor) -> Tokens:
    """Tokens of which only the candidates matter: all else is NaN."""
    nan = torch.full((len(log_p),), math.nan, dtype=torch.float64)
    candidates = {"candidate_logprobs": log_p, "ref_candidate_logprobs": log_q}
    return Tokens.by_hand(nan, nan, nan, **candidates)


@pytest.mark.parametrize(
    ("loss", "rows", "metric"),
    [(forward_kl_topk, FORWARD, "forward_kl"), (reverse_kl_topk, REVERSE, "reverse_kl")],
    ids=["forward", "reverse"],
)
def test_value_and_gradient_are_those_worked_by_hand(loss, rows, metric):
    p, q, values, gradients = zip(*rows, strict=True)
    log_p, log_q = candidates(p, q)
    log_p.requires_grad_()
    log_q.requires_grad_()
    out = loss(given(log_p, log_q))
    out.loss.sum().backward()
    same(out.loss, torch.tensor(values, dtype=torch.float64))
    assert log_p.grad is not None
    same(log_p.grad, torch.tensor(gradients, dtype=torch.float64))
    assert log_q.grad is None  # a teacher learns nothing
    same(out.metrics[metric], out.loss.detach())
    assert not any(values.requires_grad for values in out.metrics.values())


def test_the_probabilities_of_the_rests_are_metrics():
    tokens = given(*candidates([APART[0], NO_REST[0]], [APART[1], NO_REST[1]]))
    same(forward_kl_topk(tokens).metrics["ref_rest"], torch.tensor([1 / 4, 1 / 4]).double())
    same(reverse_kl_topk(tokens).metrics["rest"], torch.tensor([1 / 2, MIN_REST]).double())


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
        log_p, log_q = candidates([APART[0]], [APART[1]])
        out = jsd_topk(given(log_p.requires_grad_(), log_q), mix=mix)
        out.loss.sum().backward()
        same(out.loss, torch.tensor([value], dtype=torch.float64))
        assert log_p.grad is not None
        same(log_p.grad, torch.tensor([slope], dtype=torch.float64))
        same(out.metrics["jsd"], out.loss.detach())


def random_batch(num_tokens: int = 200, vocabulary: int = 12, top_k: int = 4) -> Tokens:
    """The teacher's likeliest of two random distributions over a vocabulary."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, num_tokens, vocabulary, generator=random, dtype=torch.float64) * 2
    log_p, log_q = logits.log_softmax(-1)
    log_q, ids = log_q.topk(top_k)
    return given(log_p.gather(-1, ids), log_q)


def whole(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) and KL(p || q) [N] of whole distributions."""
    gap = log_q - log_p
    return (log_q.exp() * gap).sum(-1), (log_p.exp() * -gap).sum(-1)


@every_loss
def test_a_divergence_is_never_negative_and_zero_only_where_both_agree(loss):
    tokens = random_batch()
    assert LOSSES[loss](tokens).loss.min() > 0
    assert tokens.ref_candidate_logprobs is not None
    agreed = given(tokens.ref_candidate_logprobs, tokens.ref_candidate_logprobs)
    assert LOSSES[loss](agreed).loss.abs().max() < 1e-15


def test_the_divergence_over_candidates_is_at_most_that_of_the_vocabulary():
    """With all tokens but one as candidates the rest is that one, and nothing is lost."""
    random = torch.Generator().manual_seed(1)
    log_p, log_q = torch.randn(2, 50, 9, generator=random, dtype=torch.float64).log_softmax(-1)
    forward, reverse = whole(log_p, log_q)
    for top_k in range(1, 9):
        best, ids = log_q.topk(top_k)
        tokens = given(log_p.gather(-1, ids), best)
        found = forward_kl_topk(tokens).loss, reverse_kl_topk(tokens).loss
        for value, limit in zip(found, (forward, reverse), strict=True):
            assert (value <= limit + 1e-12).all()
            if top_k == 8:
                same(value, limit)


def test_the_ends_of_the_mix_are_the_two_divergences():
    tokens = random_batch()
    near = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5)
    near(jsd_topk(tokens, mix=1e-6).loss / 1e-6, forward_kl_topk(tokens).loss)
    near(jsd_topk(tokens, mix=1 - 1e-6).loss / 1e-6, reverse_kl_topk(tokens).loss)
    assert jsd_topk(tokens, mix=0.5).loss.max() <= L


@every_loss
def test_an_empty_batch_has_an_empty_loss(loss):
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert LOSSES[loss](given(empty, empty)).loss.shape == (0,)


@every_loss
def test_in_float32_an_empty_rest_stays_finite(loss):
    log_p = torch.tensor([[0.0, -120.0], [-1e-9, -60.0], [-0.7, -120.0]]).requires_grad_()
    log_q = torch.tensor([[-1e-9, -80.0], [-0.7, -0.7], [-0.7, -110.0]])  # the last: 0 in both
    out = LOSSES[loss](given(log_p, log_q))
    (gradient,) = torch.autograd.grad(out.loss.sum(), log_p)
    assert out.loss.isfinite().all()
    assert gradient.isfinite().all()


def test_without_a_teacher_s_candidates_there_is_no_comparison():
    tokens = given(torch.zeros(1, 1), torch.zeros(1, 1))
    for field in ("candidate_logprobs", "ref_candidate_logprobs"):
        lacking = Tokens(**{**vars(tokens), field: None})
        with pytest.raises(ValueError, match="this loss needs a teacher: use reference=model"):
            candidate_distributions(lacking)
