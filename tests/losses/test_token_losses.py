"""Token losses against numbers worked by hand, one row for each branch of the formula."""

from functools import partial

import pytest
import torch

from losses.cispo import cispo
from losses.cross_entropy import cross_entropy
from losses.decoupled_ppo import decoupled_ppo
from losses.distill import distill
from losses.dppo import dppo
from losses.gspo import gspo
from losses.masked_is import masked_is
from losses.ppo_clip import ppo_clip
from losses.reinforce import reinforce
from losses.sapo import sapo
from losses.tokens import Tokens

LN2 = 0.6931471805599453  # -log(1/2)


def test_cispo_bounds_the_weight_and_never_the_gradient(check_table):
    rows = [  # loss = -clip(ratio, 0.5, 3) * A * log pi, gradient = -clip(ratio, 0.5, 3) * A
        (1 / 2, 1 / 4, 1.0, 2 * LN2, -2.0),  # ratio 2 within the bounds
        (1 / 2, 1 / 8, 1.0, 3 * LN2, -3.0),  # ratio 4 -> 3
        (1 / 8, 1 / 2, 1.0, 1.5 * LN2, -0.5),  # ratio 1/4 -> 1/2, log pi = -3 ln 2
        (1 / 2, 1 / 8, -2.0, -6 * LN2, 6.0),  # ratio 4 -> 3, pushed down
        (1 / 2, 1 / 8, 0.0, 0.0, 0.0),  # nothing to learn
    ]
    check_table(partial(cispo, clip_low=0.5, clip_high=3.0), rows, clip_fraction=[0, 1, 1, 1, 1])


def test_ppo_clip_removes_the_gradient_only_in_the_direction_that_moved_too_far(check_table):
    rows = [  # bounds 1 - 0.2 and 1 + 0.28; unclipped: loss = -A r, gradient = -A r
        (1 / 2, 1 / 2, 1.0, -1.0, -1.0),  # ratio 1
        (1 / 2, 1 / 2, -3.0, 3.0, 3.0),  # ratio 1
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0),  # ratio 2, rising on: max(-2, -1.28)
        (1 / 2, 1 / 4, -1.0, 2.0, 2.0),  # ratio 2, to be lowered: max(2, 1.28)
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5),  # ratio 1/2, to be raised: max(-0.5, -0.8)
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0),  # ratio 1/2, falling on: max(0.5, 0.8)
        (1 / 2, 1 / 64, -2.0, 64.0, 64.0),  # ratio 32: no limit without dual_clip
        (1 / 2, 1 / 4, 0.0, 0.0, 0.0),
    ]
    check_table(
        partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=None),
        rows,
        clip_fraction=[0, 0, 1, 0, 0, 1, 0, 0],
        clip_fraction_low=[0, 0, 0, 0, 0, 1, 0, 0],
        clip_fraction_high=[0, 0, 1, 0, 0, 0, 0, 0],
    )


def test_dual_clip_bounds_the_loss_of_a_negative_advantage(check_table):
    rows = [  # as above; where A < 0 also at most -3 A
        (1 / 2, 1 / 8, -2.0, 6.0, 0.0),  # ratio 4: min(8, 6)
        (1 / 2, 1 / 4, -2.0, 4.0, 4.0),  # ratio 2: min(4, 6)
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0),  # ratio 1/2: the lower bound still holds
        (1 / 2, 1 / 8, 1.0, -1.28, 0.0),  # ratio 4, A > 0: the upper bound, not 3
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5),  # ratio 1/2, A > 0: min(-0.5, -3) would be wrong
    ]
    check_table(
        partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        rows,
        clip_fraction=[1, 0, 1, 1, 0],
        clip_fraction_low=[0, 0, 1, 0, 0],
        clip_fraction_high=[0, 0, 0, 1, 0],
        clip_fraction_dual=[1, 0, 0, 0, 0],
    )


def test_gspo_clips_whole_sequences_by_their_mean_log_ratio(check_table):
    rows = [  # sequences interleaved; bounds 0.8 and 1.28
        # 0: log ratios 3 ln 2 and -ln 2, mean ln 2, ratio 2; A < 0: max(2, 1.28). The gradient of
        # a token is (2 tokens' losses) * 2 * (1/2 of the mean) = 2
        (1 / 2, 1 / 16, -1.0, 2.0, 2.0),
        # 1: one token, ratio 1/2; A > 0: max(-0.5, -0.8)
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5),
        # 2: log ratios ln 2, ln 2, ratio 2; A > 0: max(-2, -1.28), clipped
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0),
        # 0 again, though this token alone has ratio 1/2
        (1 / 4, 1 / 2, -1.0, 2.0, 2.0),
        # 3: ratio 1/2, A < 0: max(0.5, 0.8), clipped
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0),
        # 2 again
        (1 / 4, 1 / 8, 1.0, -1.28, 0.0),
    ]
    check_table(
        partial(gspo, clip_low=0.2, clip_high=0.28),
        rows,
        sequence_ids=[0, 1, 2, 0, 3, 2],
        clip_fraction=[0, 0, 1, 0, 1, 1],
        clip_fraction_low=[0, 0, 0, 0, 1, 0],
        clip_fraction_high=[0, 0, 1, 0, 0, 1],
    )


def test_gspo_clamps_the_mean_and_not_the_tokens():
    # log ratios 30 and -10: the mean 10 is inside +-20 though one token is not
    logprobs = torch.tensor([-1.0, -11.0], dtype=torch.float64, requires_grad=True)
    rollout_logprobs = torch.tensor([-31.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    tokens = Tokens.by_hand(logprobs, rollout_logprobs, advantages)
    loss = gspo(tokens, clip_low=0.2, clip_high=0.2).loss
    e10 = 22026.465794806718  # e^10
    torch.testing.assert_close(loss, torch.tensor([e10, e10], dtype=torch.float64))


def test_reinforce_weighs_log_pi_by_the_advantage_and_takes_no_ratio(check_table):
    rows = [
        (1 / 2, 1 / 16, 3.0, 3 * LN2, -3.0),
        (1 / 8, 1 / 2, -1.0, -3 * LN2, 1.0),
        (1 / 8, 1 / 2, 0.0, 0.0, 0.0),
    ]
    check_table(reinforce, rows)


def test_sapo_gates_smoothly_with_a_temperature_by_sign(check_table):
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
        (1 / 2, 1 / 4, 0.0, 0.0, 0.0),
    ]
    gates = [1.0, 1.0, gate1, gate2, gate_half, gate2]
    check_table(partial(sapo, tau_positive=1.0, tau_negative=2.0), rows, gate=gates)


def test_cross_entropy_ignores_advantage_and_ratio(check_table):
    rows = [(1 / 2, 1 / 2, 1.0, LN2, -1.0), (1 / 8, 1 / 2, -5.0, 3 * LN2, -1.0)]
    check_table(cross_entropy, rows)


def test_distill_moves_log_pi_towards_the_teacher(check_table):
    rows = [  # second column: the teacher. loss = (log pi - log ref) log pi, first factor constant
        (1 / 2, 1 / 8, 9.0, -2 * LN2 * LN2, 2 * LN2),  # 2 ln 2 too likely: pushed down
        (1 / 8, 1 / 2, 9.0, 6 * LN2 * LN2, -2 * LN2),  # (-2 ln 2)(-3 ln 2): pushed up
        (1 / 4, 1 / 4, 9.0, 0.0, 0.0),  # agreed
    ]
    check_table(distill, rows, reverse_kl=[2 * LN2, -2 * LN2, 0.0])


def test_distill_without_a_teacher_is_an_error():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="needs a teacher"):
        distill(Tokens.by_hand(one, one, one))


def test_masked_is_drops_tokens_below_and_above_the_bounds(check_table):
    rows = [  # band [1/8, 8]; inside: loss = -A r, gradient = -A r
        (1 / 2, 1 / 4, 1.0, -2.0, -2.0),  # ratio 2
        (1 / 2, 1 / 4, -1.0, 2.0, 2.0),  # ratio 2, pushed down
        (1 / 2, 1 / 32, 1.0, 0.0, 0.0),  # ratio 16, above
        (1 / 2, 1 / 32, -1.0, 0.0, 0.0),  # ratio 16, above, whatever the direction
        (1 / 32, 1 / 2, 1.0, 0.0, 0.0),  # ratio 1/16, below
    ]
    check_table(
        partial(masked_is, ratio_low=0.125, ratio_high=8.0),
        rows,
        masked_fraction=[0, 0, 1, 1, 1],
        masked_fraction_low=[0, 0, 0, 0, 1],
        masked_fraction_high=[0, 0, 1, 1, 0],
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


def test_dppo_drops_by_moved_probability_and_penalises_every_ratio(check_table):
    q = LN2 * LN2  # (log ratio)^2 of ratio 2 or 1/2
    rows = [  # loss = -A r + 0.1 (log r)^2, gradient = -A r + 0.2 log r; dropped: without -A r
        (1 / 2, 1 / 4, 1.0, 0.1 * q, 0.2 * LN2),  # moved +1/4 > 0.12, rising on: dropped
        (1 / 2, 1 / 4, -1.0, 2.0 + 0.1 * q, 2.0 + 0.2 * LN2),  # +1/4, to be lowered: kept
        (1 / 4, 1 / 2, -1.0, 0.1 * q, -0.2 * LN2),  # moved -1/4 < -0.2, falling on: dropped
        (1 / 4, 1 / 2, 1.0, -0.5 + 0.1 * q, -0.5 - 0.2 * LN2),  # -1/4, to be raised: kept
        (1 / 4, 1 / 2, 0.0, 0.1 * q, -0.2 * LN2),  # A = 0 goes with the falling ones
        # ratio 8 is far outside any ratio clip, but 1/8 - 1/64 = 0.11 is a small move: kept
        (1 / 8, 1 / 64, 1.0, -8.0 + 0.9 * q, -8.0 + 0.6 * LN2),
        (1 / 8, 1 / 4, -1.0, 0.5 + 0.1 * q, 0.5 - 0.2 * LN2),  # -1/8 > -0.2: kept
    ]
    check_table(
        partial(dppo, delta_low=0.2, delta_high=0.12, tau=0.1),
        rows,
        masked_fraction=[1, 0, 1, 0, 1, 0, 0],
        masked_fraction_low=[0, 0, 1, 0, 1, 0, 0],
        masked_fraction_high=[1, 0, 0, 0, 0, 0, 0],
    )


def test_dppo_measures_the_move_from_the_policy_that_sampled():
    # pi = 1/2, old = 1/2, mu = 1/8: ratio to old 1, but 3/8 above mu: dropped
    half, eighth = torch.tensor([-LN2]), torch.tensor([-3 * LN2])
    tokens = Tokens.by_hand(half, eighth, torch.tensor([1.0]), old_logprobs=half)
    out = dppo(tokens, delta_low=0.2, delta_high=0.2, tau=0.1)
    torch.testing.assert_close(out.loss, torch.tensor([0.0]))
    torch.testing.assert_close(out.metrics["masked_fraction_high"], torch.tensor([1.0]))
