"""GAE against tables worked by hand, and invariants of any values."""

import pytest
import torch

from losses.gae import gae

REWARDS, VALUES = [0.0, 0.0, 1.0], [0.5, 0.25, 0.5]

TABLE = [
    # gamma, lambda, advantages; the value after the last step is 0
    (1.0, 1.0, [0.5, 0.75, 0.5]),  # return 1 at every step, minus the value
    (0.5, 1.0, [-0.25, 0.25, 0.5]),  # returns 1/4, 1/2, 1
    # deltas 0.5 * 0.25 - 0.5, 0.5 * 0.5 - 0.25, 1 - 0.5
    (0.5, 0.0, [-0.375, 0.0, 0.5]),
    # from the back: 0.5; 0 + 0.25 * 0.5; -0.375 + 0.25 * 0.125
    (0.5, 0.5, [-0.34375, 0.125, 0.5]),
    (0.0, 0.5, [-0.5, -0.25, 0.5]),  # reward minus value, whatever lambda
]


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "gae_lambda", "expected"), TABLE)
def test_a_rollout_beside_a_longer_one_has_the_advantages_of_the_table(gamma, gae_lambda, expected):
    rewards = table([*REWARDS, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    values = table([*VALUES, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0])
    found = gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(found[0], table([*expected, 0.0, 0.0])[0], rtol=1e-12, atol=1e-12)


def test_no_rollout_and_no_step_give_an_empty_table():
    for shape in ((0, 3), (3, 0), (0, 0)):
        empty = torch.zeros(shape)
        assert gae(empty, empty, gamma=1.0, gae_lambda=1.0).shape == shape
