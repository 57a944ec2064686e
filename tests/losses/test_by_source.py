"""A demonstration is imitated, and every other token gets the loss of the policy, by hand."""

import math
from functools import partial

import torch

from losses.by_source import by_source
from losses.cispo import cispo
from losses.groups import Source
from losses.tokens import Tokens

LN2 = math.log(2)
LOSS = partial(
    by_source, policy_loss=partial(cispo, clip_low=0.0, clip_high=2.0), demonstration_weight=0.25
)
TABLE = [  # pi, mu, advantage, source, loss, gradient in log pi, clip_fraction
    (1 / 2, 1 / 2, 1.0, Source.POLICY, LN2, -1.0, 0),
    (1 / 2, 1 / 8, -1.0, Source.POLICY, -2 * LN2, 2.0, 1),  # ratio 4, bounded by 2
    (1 / 4, 1 / 2, 1.0, Source.REPLAY, LN2, -1 / 2, 0),  # ratio 1/2
    (1 / 4, 1.0, 0.0, Source.DEMONSTRATION, LN2 / 2, -1 / 4, 0),
    (1 / 2, 1 / 16, -3.0, Source.DEMONSTRATION, LN2 / 4, -1 / 4, 0),  # nothing else matters
]


def test_value_gradient_and_metrics():
    pi, mu, advantages, source, losses, gradients, clipped = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*TABLE, strict=True)
    )
    logprobs = pi.log().requires_grad_()
    out = LOSS(Tokens.by_hand(logprobs, mu.log(), advantages, source=source.long()))
    out.loss.sum().backward()
    torch.testing.assert_close(out.loss, losses)
    torch.testing.assert_close(logprobs.grad, gradients)
    torch.testing.assert_close(out.metrics["clip_fraction"].double(), clipped)


def test_without_demonstrations_it_is_the_loss_of_the_policy():
    logprobs, mu = -torch.rand(2, 5, dtype=torch.float64) - 0.1
    tokens = Tokens.by_hand(logprobs.requires_grad_(), mu, torch.ones(5))
    torch.testing.assert_close(LOSS(tokens).loss, cispo(tokens, clip_low=0, clip_high=2).loss)


def test_a_demonstration_whose_ratio_is_clamped_is_not_counted_as_clamped():
    logprobs = torch.tensor([-30.0, -30.0], requires_grad=True)
    tokens = Tokens.by_hand(logprobs, torch.zeros(2), torch.ones(2), source=torch.tensor([0, 2]))
    out = LOSS(tokens)
    assert out.ratio_clamped.tolist() == [1.0, 0.0]
    out.loss.sum().backward()
    assert logprobs.grad.tolist()[1] == -0.25
