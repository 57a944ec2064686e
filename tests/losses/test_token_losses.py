"""Token losses against numbers worked by hand, one row for each branch of the formula.

Probabilities are powers of 1/2, so ratios are exact and log probabilities multiples of ln 2.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from losses.by_source import by_source
from losses.cispo import cispo
from losses.cross_entropy import cross_entropy
from losses.decoupled_ppo import decoupled_ppo
from losses.distill import distill
from losses.dppo import dppo
from losses.groups import Source
from losses.gspo import gspo
from losses.m2po import M2PO
from losses.masked_is import masked_is
from losses.ppo_clip import ppo_clip
from losses.reinforce import reinforce
from losses.sapo import sapo
from losses.tokens import Tokens, log_ratio, ratio_to
from losses.top_entropy import is_highest, top_entropy

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
