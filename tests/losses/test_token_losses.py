"""Token losses against numbers worked by hand, one row for each branch of the formula.

Probabilities are powers of 1/2, so ratios are exact and log probabilities multiples of ln 2. The
last tests are of losses over candidates, and of all losses with their shipped options.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from losses.by_source import by_source
from losses.candidates import MIN_REST
from losses.cispo import cispo
from losses.cross_entropy import cross_entropy
from losses.decoupled_ppo import decoupled_ppo
from losses.distill import distill
from losses.dppo import dppo
from losses.forward_kl_topk import forward_kl_topk
from losses.groups import Source
from losses.gspo import gspo
from losses.jsd_topk import jsd_topk
from losses.m2po import M2PO
from losses.masked_is import masked_is
from losses.ppo_clip import ppo_clip
from losses.reinforce import reinforce
from losses.reverse_kl_topk import reverse_kl_topk
from losses.sapo import sapo
from losses.tokens import Tokens, log_ratio, ratio_to
from losses.top_entropy import is_highest, top_entropy
from rl.config.build import component
from tests.support.composing import CONF, chosen
from tests.support.golden import golden

torch.set_num_threads(1)

LN2 = math.log(2)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def vector(values):
    return torch.tensor(values, dtype=torch.float64)


def check_table(loss_function, rows, *, bounds=(), sequence_ids=None, others=None, **metrics):
    """Compare with rows of (pi, anchor probability, advantage, loss, d loss / d log pi).

    With `bounds`, a prefix and names, a row ends with the name of the bound that acts, or with "".
    """
    pi, anchor, advantages, *expected = vector([row[:5] for row in rows]).T
    for prefix in bounds[:1]:
        metrics[prefix] = [row[5] != "" for row in rows]
        metrics |= {f"{prefix}_{name}": [row[5] == name for row in rows] for name in bounds[1:]}
    ids = torch.tensor(sequence_ids or range(len(rows)))
    logprobs, also = pi.log().requires_grad_(), {"ref_logprobs": anchor.log(), **(others or {})}
    also |= {"sequence_ids": ids, "num_sequences": int(ids.max()) + 1}
    out = loss_function(Tokens.by_hand(logprobs, anchor.log(), advantages, **also))
    out.loss.sum().backward()
    exact([out.loss, logprobs.grad], expected)
    assert not any(metric.requires_grad for metric in out.metrics.values())
    assert set(out.metrics) == set(metrics)
    for name, values in metrics.items():
        torch.testing.assert_close(out.metrics[name].double(), vector(values))


def test_cispo_bounds_the_weight_and_never_the_gradient():
    rows = [  # loss = -clip(ratio, 0.5, 3) * A * log pi, gradient = -clip(ratio, 0.5, 3) * A
        (1 / 2, 1 / 4, 1.0, 2 * LN2, -2.0),  # ratio 2 within the bounds
        (1 / 2, 1 / 8, 1.0, 3 * LN2, -3.0),  # ratio 4 -> 3
        (1 / 8, 1 / 2, 1.0, 1.5 * LN2, -0.5),  # ratio 1/4 -> 1/2, log pi = -3 ln 2
        (1 / 2, 1 / 8, -2.0, -6 * LN2, 6.0),  # ratio 4 -> 3, pushed down
    ]
    check_table(partial(cispo, clip_low=0.5, clip_high=3.0), rows, clip_fraction=[0, 1, 1, 1])


def test_ppo_clip_removes_the_gradient_only_in_the_direction_that_moved_too_far():
    rows = [  # bounds 1 - 0.2 and 1 + 0.28; unclipped: loss = -A r, gradient = -A r
        (1 / 2, 1 / 2, -3.0, 3.0, 3.0, ""),  # ratio 1
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0, "high"),  # ratio 2, rising on: max(-2, -1.28)
        (1 / 2, 1 / 4, -1.0, 2.0, 2.0, ""),  # ratio 2, to be lowered: max(2, 1.28)
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5, ""),  # ratio 1/2, to be raised: max(-0.5, -0.8)
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0, "low"),  # ratio 1/2, falling on: max(0.5, 0.8)
        (1 / 2, 1 / 64, -2.0, 64.0, 64.0, ""),  # ratio 32: no limit without dual_clip
    ]
    plain = partial(ppo_clip, **CLIP, dual_clip=None)
    check_table(plain, rows, bounds=("clip_fraction", "low", "high"))
    rows[-1] = (1 / 2, 1 / 64, -2.0, 6.0, 0.0, "dual")  # with dual_clip 3 at most -3 A
    rows.append((1 / 2, 1 / 8, 1.0, -1.28, 0.0, "high"))  # ratio 4, A > 0: not 3
    dual = partial(ppo_clip, **CLIP, dual_clip=3.0)
    check_table(dual, rows, bounds=("clip_fraction", "low", "high", "dual"))


def test_gspo_clips_whole_sequences_by_their_mean_log_ratio():
    rows = [  # sequences interleaved; bounds 0.8 and 1.28
        # 0: log ratios 3 ln 2 and -ln 2, mean ln 2, ratio 2; A < 0: max(2, 1.28). The gradient of
        # a token is (2 tokens' losses) * 2 * (1/2 of the mean) = 2
        (1 / 2, 1 / 16, -1.0, 2.0, 2.0, ""),
        # 1: one token, ratio 1/2; A > 0: max(-0.5, -0.8)
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5, ""),
        # 2: log ratios ln 2, ln 2, ratio 2; A > 0: max(-2, -1.28), clipped
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0, "high"),
        # 0 again, though this token alone has ratio 1/2
        (1 / 4, 1 / 2, -1.0, 2.0, 2.0, ""),
        # 3: ratio 1/2, A < 0: max(0.5, 0.8), clipped
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0, "low"),
        # 2 again
        (1 / 4, 1 / 8, 1.0, -1.28, 0.0, "high"),
        # 4: log ratios 30 and -10: the mean 10 is inside +-20 though one token is not
        (math.exp(-1), math.exp(-31), -1.0, math.exp(10), math.exp(10), ""),
        (math.exp(-11), math.exp(-1), -1.0, math.exp(10), math.exp(10), ""),
    ]
    check_table(
        partial(gspo, **CLIP),
        rows,
        bounds=("clip_fraction", "low", "high"),
        sequence_ids=[0, 1, 2, 0, 3, 2, 4, 4],
    )
    # What is clamped and counted is the mean of a sequence, here 12.5 and 22.
    pi, mu = vector([-1.0, -1.0, -0.5, -0.5]), vector([-21.5, -5.5, -20.4, -24.6])
    ids = torch.tensor([0, 0, 1, 1])
    tokens = Tokens.by_hand(pi, mu, torch.ones(4), sequence_ids=ids, num_sequences=2)
    assert gspo(tokens, **CLIP).ratio_clamped.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_sapo_gates_smoothly_with_a_temperature_by_sign():
    # s(x) = 1 / (1 + e^-x); loss = -A s(tau (r - 1)) 4 / tau, gradient = -A r 4 s (1 - s)
    s1, s2 = 0.7310585786300049, 0.8807970779778823  # s(1), s(2)
    s_half = 0.3775406687981454  # s(-1/2)
    gate1, gate2, gate_half = 0.7864477329659274, 0.41997434161402614, 0.9400148488063780
    rows = [  # tau 1 where A > 0, tau 2 elsewhere
        (1 / 2, 1 / 2, 1.0, -2.0, -1.0),  # ratio 1: s = 1/2, PPO's gradient
        (1 / 2, 1 / 2, -1.0, 1.0, 1.0),  # ratio 1, tau 2: half the value, the same gradient
        (1 / 2, 1 / 4, 1.0, -4 * s1, -2 * gate1),  # ratio 2
        (1 / 2, 1 / 4, -1.0, 2 * s2, 2 * gate2),  # ratio 2, tau 2: fades faster
        (1 / 4, 1 / 2, 1.0, -4 * s_half, -0.5 * gate_half),  # ratio 1/2
    ]
    gates = [1.0, 1.0, gate1, gate2, gate_half]
    check_table(partial(sapo, tau_positive=1.0, tau_negative=2.0), rows, gate=gates)


def test_losses_without_a_ratio():
    rows = [(1 / 2, 1 / 16, 3.0, 3 * LN2, -3.0), (1 / 8, 1 / 2, -1.0, -3 * LN2, 1.0)]
    check_table(reinforce, rows)
    rows = [(1 / 2, 1 / 2, 1.0, LN2, -1.0), (1 / 8, 1 / 2, -5.0, 3 * LN2, -1.0)]
    check_table(cross_entropy, rows)
    rows = [  # second column: the teacher. loss = (log pi - log ref) log pi, first factor constant
        (1 / 2, 1 / 8, 9.0, -2 * LN2 * LN2, 2 * LN2),  # 2 ln 2 too likely: pushed down
        (1 / 8, 1 / 2, 9.0, 6 * LN2 * LN2, -2 * LN2),  # (-2 ln 2)(-3 ln 2): pushed up
    ]
    check_table(distill, rows, reverse_kl=[2 * LN2, -2 * LN2])


def test_masked_is_drops_tokens_below_and_above_the_bounds():
    rows = [  # band [1/8, 8]; inside: loss = -A r, gradient = -A r
        (1 / 2, 1 / 4, 1.0, -2.0, -2.0, ""),  # ratio 2
        (1 / 2, 1 / 32, 1.0, 0.0, 0.0, "high"),  # ratio 16, above
        (1 / 2, 1 / 32, -1.0, 0.0, 0.0, "high"),  # ratio 16, above, whatever the direction
        (1 / 32, 1 / 2, 1.0, 0.0, 0.0, "low"),  # ratio 1/16, below
    ]
    check_table(
        partial(masked_is, ratio_low=0.125, ratio_high=8.0),
        rows,
        bounds=("masked_fraction", "low", "high"),
    )


@pytest.mark.parametrize(
    "loss",
    [
        partial(masked_is, ratio_low=1.0, ratio_high=1.0),
        partial(ppo_clip, clip_low=0.0, clip_high=0.0, dual_clip=1.0),
        partial(gspo, clip_low=0.0, clip_high=0.0),
        partial(decoupled_ppo, clip_low=0.0, clip_high=0.0, weight_cap=1.0),
        partial(dppo, delta_low=0.0, delta_high=0.0, tau=1.0),
    ],
)
def test_a_token_that_equals_every_bound_is_neither_dropped_nor_counted(loss):
    tokens = Tokens.by_hand(-torch.ones(2), -torch.ones(2), torch.tensor([1.0, -1.0]))
    out = loss(tokens)
    assert out.loss.tolist() == [-1.0, 1.0]
    assert not any(m.any() for name, m in out.metrics.items() if name != "proximal_weight")


def test_dppo_drops_by_moved_probability_and_penalises_every_ratio():
    q = LN2 * LN2  # (log ratio)^2 of ratio 2 or 1/2
    rows = [  # loss = -A r + 0.1 (log r)^2, gradient = -A r + 0.2 log r; dropped: without -A r
        (1 / 2, 1 / 4, 1.0, 0.1 * q, 0.2 * LN2, "high"),  # moved +1/4 > 0.12, rising on: dropped
        (1 / 2, 1 / 4, -1.0, 2.0 + 0.1 * q, 2.0 + 0.2 * LN2, ""),  # +1/4, to be lowered: kept
        (1 / 4, 1 / 2, -1.0, 0.1 * q, -0.2 * LN2, "low"),  # moved -1/4 < -0.2, falling on: dropped
        (1 / 4, 1 / 2, 1.0, -0.5 + 0.1 * q, -0.5 - 0.2 * LN2, ""),  # -1/4, to be raised: kept
        (1 / 4, 1 / 2, 0.0, 0.1 * q, -0.2 * LN2, "low"),  # A = 0 goes with the falling ones
        # ratio 8 is far outside any ratio clip, but 1/8 - 1/64 = 0.11 is a small move: kept
        (1 / 8, 1 / 64, 1.0, -8.0 + 0.9 * q, -8.0 + 0.6 * LN2, ""),
        (1 / 8, 1 / 4, -1.0, 0.5 + 0.1 * q, 0.5 - 0.2 * LN2, ""),  # -1/8 > -0.2: kept
    ]
    loss = partial(dppo, delta_low=0.2, delta_high=0.12, tau=0.1)
    bounds = ("masked_fraction", "low", "high")
    check_table(loss, rows, bounds=bounds)
    # What counts is the move from mu: pi = 1/2 and old = 1/2, but 3/8 above mu = 1/8.
    old = {"old_logprobs": vector([1 / 2]).log()}
    rows = [(1 / 2, 1 / 8, 1.0, 0.0, 0.0, "high")]
    check_table(loss, rows, bounds=bounds, others=old)


def test_a_demonstration_is_imitated_and_every_other_token_has_the_loss_of_the_policy():
    rows = [
        (1 / 2, 1 / 8, -1.0, -2 * LN2, 2.0),  # ratio 4, bounded by 2
        (1 / 4, 1 / 2, 1.0, LN2, -1 / 2),  # replayed, ratio 1/2
        (1 / 4, 1.0, 0.0, LN2 / 2, -1 / 4),  # a demonstration
        (1 / 2, 1 / 16, -3.0, LN2 / 4, -1 / 4),  # another: nothing else matters
    ]
    policy_loss = partial(cispo, clip_low=0.0, clip_high=2.0)
    loss = partial(by_source, policy_loss=policy_loss, demonstration_weight=0.25)
    source = torch.tensor([Source.POLICY, Source.REPLAY, *[Source.DEMONSTRATION] * 2])
    check_table(loss, rows, others={"source": source}, clip_fraction=[1, 0, 0, 0])
    # The clamped ratio of a demonstration is not counted.
    clamped = Tokens.by_hand(torch.full((2,), -30.0), torch.zeros(2), torch.ones(2))
    clamped = replace(clamped, source=torch.tensor([Source.POLICY, Source.DEMONSTRATION]))
    assert loss(clamped).ratio_clamped.tolist() == [1.0, 0.0]


def test_only_the_tokens_of_highest_entropy_of_each_sequence_train():
    rows = [  # PPO's clip where it is among the ceil(0.4 n) highest entropies of its sequence
        (1 / 2, 1 / 8, -2.0, 6.0, 0.0, "dual"),  # 0: the first of five, bounded by dual_clip
        (1 / 2, 1 / 4, -1.0, 0.0, 0.0, ""),  # 1: the second of three, 2 are in, but see below
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0, "high"),  # 0: the second of five, clipped
        (1 / 2, 1 / 4, -1.0, 0.0, 0.0, ""),  # 0: the third of five: out
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5, ""),  # 1: the first of three
        (1 / 2, 1 / 2, -3.0, 0.0, 0.0, ""),  # 0: out
        (1 / 2, 1 / 2, 1.0, 0.0, 0.0, ""),  # 0: out
        (1 / 2, 1 / 2, 2.0, -2.0, -2.0, ""),  # 1: the second of three
    ]
    check_table(
        partial(top_entropy, fraction=0.4, **CLIP, dual_clip=3.0),
        rows,
        bounds=("clip_fraction", "low", "high", "dual"),
        sequence_ids=[0, 1, 0, 0, 1, 0, 0, 1],
        others={"entropies": torch.tensor([9.0, 0.1, 8.0, 2.0, 3.0, 1.0, 0.0, 0.5])},
        kept_fraction=[1, 0, 1, 0, 1, 0, 0, 1],
    )


@pytest.mark.parametrize(
    ("entropies", "fraction", "expected"),
    [
        ([1.0, 1.0, 0.0, 0.0], 0.25, [True, True, False, False]),  # ties are kept
        ([0.3], 0.01, [True]),  # at least one
        ([float(i) for i in range(25)], 0.28, [False] * 18 + [True] * 7),  # 7.000000000000001
        ([], 0.2, []),
    ],
)
def test_the_number_of_highest_values_is_rounded_up_and_includes_ties(
    entropies, fraction, expected
):
    values, ids = torch.tensor(entropies), torch.ones(len(entropies), dtype=torch.int64)
    # Two sequences have no token.
    assert is_highest(values, ids, 3, fraction).tolist() == expected


def test_the_anchor_of_staler_tokens_is_closer_to_the_policy():
    rows = [  # staleness s: prox = mu^(1 / (s + 1)) * pi^(s / (s + 1))
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0),  # s 0: prox mu, weight 1, ratio 2, clipped as PPO's
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0),  # s 0: clipped below
        # s 1: pi / mu = 4, prox half way: weight 2, ratio 2, clipped at 1.28
        (1 / 2, 1 / 8, 1.0, -2.56, 0.0),
        (1 / 2, 1 / 8, -1.0, 4.0, 4.0),  # 2 * 2
        # s 3: pi / mu = 2^-4, prox three quarters of the way: weight 1/8, ratio 1/2
        (1 / 32, 1 / 2, 1.0, -1 / 16, -1 / 16),
        (1 / 32, 1 / 2, -1.0, 0.1, 0.0),  # 1/8 * 0.8
        # s 3: pi / mu = 2^4: weight 8 -> 5, ratio 2
        (1 / 2, 1 / 32, -1.0, 10.0, 10.0),
    ]
    loss = partial(decoupled_ppo, **CLIP, weight_cap=5.0)
    check_table(
        loss,
        rows,
        others={"staleness": torch.tensor([0, 0, 1, 1, 3, 3, 3])},
        clip_fraction=[1, 1, 1, 0, 0, 1, 0],
        proximal_weight=[1, 1, 2, 2, 1 / 8, 1 / 8, 8],
        weight_capped=[0, 0, 0, 0, 0, 0, 1],
    )
    # If old is known, here 1/4: weight old / mu, ratio pi / old, whatever the staleness.
    rows = [(1 / 2, 1 / 8, -1.0, 4.0, 4.0), (1 / 4, 1 / 2, 1.0, -0.5, -0.5)]
    others = {"staleness": torch.tensor([0, 3]), "old_logprobs": vector([1 / 4, 1 / 4]).log()}
    none = {"clip_fraction": [0, 0], "weight_capped": [0, 0]}
    check_table(loss, rows, others=others, proximal_weight=[2, 1 / 2], **none)


def m2po(max_second_moment):
    loss = M2PO(max_second_moment=max_second_moment)
    return lambda tokens: loss(tokens, loss.statistics(tokens).detach())


# pi, anchor, advantage: log ratios 0, ln 2, -2 ln 2, 3 ln 2. Squares in units of (ln 2)^2: 0, 1, 4,
# 9, so the means of the smallest are 0, 1/2, 5/3, 14/4
TOKENS = [(1 / 2, 1 / 2, 1.0), (1 / 2, 1 / 4, -1.0), (1 / 8, 1 / 2, 2.0), (1 / 2, 1 / 16, 1.0)]
LOSSES = [-1.0, 2.0, -0.5, -8.0]  # -A r, and so is the gradient


@pytest.mark.parametrize(("bound", "kept"), [(4.0, 4), (3.49, 3), (1.7, 3), (1.6, 2), (1e-9, 1)])
def test_the_tokens_that_moved_most_are_dropped_until_the_mean_square_is_small(bound, kept):
    rows = [
        (*token, loss * (i < kept), loss * (i < kept))
        for i, (token, loss) in enumerate(zip(TOKENS, LOSSES, strict=True))
    ]
    masked = [float(i >= kept) for i in range(4)]
    check_table(m2po(bound * LN2**2), rows, masked_fraction=masked)
    # Tokens of one bin are kept or dropped together.
    rows = [(1 / 2, 1 / 4, 1.0, 0.0, 0.0), (1 / 4, 1 / 2, 1.0, 0.0, 0.0)]
    check_table(m2po(0.9 * LN2**2), rows, masked_fraction=[1, 1])


def test_m2po_of_no_token_is_empty_and_a_nan_reaches_its_loss_so_that_the_step_is_skipped():
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    tokens = Tokens.by_hand(empty, empty.detach(), empty.detach())
    assert m2po(0.04)(tokens).loss.shape == (0,)
    tokens = Tokens.by_hand(torch.tensor([math.nan, -1.0]), -torch.ones(2), torch.ones(2))
    assert m2po(0.04)(tokens).loss.isnan().tolist() == [True, False]


def test_a_clamped_ratio_is_bounded_has_no_gradient_and_is_counted():
    logprobs = vector([-1.0, -31.0, -1.0, -1.0]).requires_grad_()
    mu = vector([-31.0, -1.0, -2.0, -21.0]).requires_grad_()  # log ratios 30, -30, 1, 20
    tokens = Tokens.by_hand(logprobs, mu, -torch.ones(4))
    assert not tokens.anchor.requires_grad
    exact(log_ratio(tokens.anchor, logprobs), vector([20.0, -20.0, 1.0, 20.0]))
    ratio = ratio_to(tokens.anchor, logprobs)
    e, e20 = 2.718281828459045, 485165195.4097903
    exact(ratio, vector([e20, 2.061153622438558e-9, e, e20]))
    ratio.sum().backward()
    exact(logprobs.grad, vector([0.0, 0.0, e, e20]))
    assert tokens.ratio_clamped.tolist() == [1.0, 1.0, 0.0, 0.0]
    # An older policy replaces mu as the anchor; log ratios 0, -30, 21, 0.
    old = replace(tokens, old_logprobs=vector([-1.0, -1.0, -22.0, -1.0]).requires_grad_())
    assert not old.anchor.requires_grad
    assert old.ratio_clamped.tolist() == [0.0, 1.0, 1.0, 0.0]


L, LOG_3_4 = LN2, math.log(3 / 4)
CUT = math.log(MIN_REST)
DIVERGENCES = {
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
    exact(out.loss, torch.tensor(values, dtype=torch.float64))
    exact(gradient, torch.tensor(gradients, dtype=torch.float64))
    exact(out.metrics[metric], out.loss.detach())
    assert not any(values.requires_grad for values in out.metrics.values())
    # The probabilities of the rests of APART and of NO_REST.
    expected = {"ref_rest": (1 / 4, 1 / 4), "rest": (1 / 2, MIN_REST)}
    (rest,) = expected.keys() & out.metrics.keys()
    exact(out.metrics[rest][[0, 2]], torch.tensor(expected[rest], dtype=torch.float64))


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
        exact(out.loss, torch.tensor([value], dtype=torch.float64))
        exact(gradient, torch.tensor([slope], dtype=torch.float64))
        exact(out.metrics["jsd"], out.loss.detach())


def random_batch():
    """The teacher's 4 likeliest of two random distributions over 12 tokens, at 200 places."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 200, 12, generator=random, dtype=torch.float64) * 2
    log_p, log_q = logits.log_softmax(-1)
    log_q, ids = log_q.topk(4)
    return given(log_p.gather(-1, ids), log_q)


@pytest.mark.parametrize("loss", DIVERGENCES.values(), ids=DIVERGENCES)
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


# log(pi / mu) of the tokens: within, at and beyond every clip, both clamps included.
GAPS = (0.0, 2e-4, -2e-4, 3.5e-4, 0.1, -0.15, 0.25, -0.3, 0.5, 1.0, -1.2, 2.5, -3.0, 22.0, -21.0)


def made_tokens(*, old: bool) -> Tokens:
    """Return each gap with three advantages, in 8 sequences; a ninth sequence has no token."""
    gaps, advantages = map(torch.tensor, zip(*product(GAPS, (1.5, -0.75, 0.0)), strict=True))
    number = torch.arange(len(gaps))
    wave = torch.sin(number.double()).float()
    # The first four sequences have one gap each, the others mix gaps.
    ids, mu = torch.where(number < 12, number // 3, 4 + number % 4), -1.1 + wave
    shares = torch.stack([0.5 + 0.2 * wave, 0.2 - 0.1 * wave, 0.1 + 0 * wave], -1).log()
    return Tokens.by_hand(
        (mu + gaps).requires_grad_(), mu, advantages, sequence_ids=ids, num_sequences=9,
        staleness=number % 4, entropies=(number * 7 % 11) / 4, positions=number, turns=number // 9,
        rollout_ids=ids, group_ids=ids // 2, source=number % 3,
        old_logprobs=mu + 0.8 * gaps.clamp(-1, 1) + 0.1 * wave * (number > 5) if old else None,
        ref_logprobs=mu + gaps.clamp(-2, 2) - 0.4 * wave,
        candidate_logprobs=(shares - 0.3 * wave[:, None] ** 2).requires_grad_(),
        ref_candidate_logprobs=shares,
    )  # fmt: skip


def test_each_loss_with_its_shipped_options():
    """Loss, gradients and metrics of each token, without and with logprobs of an old policy."""
    found, seen = {}, {}
    for name, old in product(
        (path.stem for path in sorted(CONF.glob("loss/*.yaml"))), (False, True)
    ):
        node, tokens = chosen("loss", name), made_tokens(old=old)
        if (first := seen.setdefault(str(node), name)) != name:  # only its other groups differ
            found[name] = f"as {first}"
            continue
        loss = component(node)
        if hasattr(loss, "statistics"):
            loss = partial(loss, statistics=loss.statistics(tokens))
        result, leaves = loss(tokens), [tokens.logprobs, tokens.candidate_logprobs]
        grads = torch.autograd.grad(result.loss.sum(), leaves, materialize_grads=True)
        values = {"loss": result.loss, "grad": grads[0], "candidates": grads[1].sum(-1)}
        values |= result.metrics | {"clamped": result.ratio_clamped}
        found[f"{name}, old={old}"] = {k: v for k, v in values.items() if v is not None and v.any()}
    golden("losses/losses", found)
