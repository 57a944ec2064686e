"""Means over all tokens, and how far vLLM is off, worked by hand."""

import math

import pytest
import torch

from losses.tokens import MAX_LOG_RATIO
from rl.learner.token_sums import TokenSums

pytestmark = pytest.mark.usefixtures("one_rank")  # test_updates.py has two

# log(pi / mu) of four fresh tokens and a stale one in the middle.
RATIOS = [2.0, 0.5, 1.0, 4.0]
PI = torch.tensor([2.0, 0.5, 999.0, 1.0, 4.0]).log() - 3
MU = torch.full((5,), -3.0)
FRESH = torch.tensor([True, True, False, True, True])
BY_HAND = {
    "mean_abs": (math.log(2) + math.log(2) + 0 + math.log(4)) / 4,
    "max_abs": math.log(4),
    # w - 1 - log w of each
    "kl": ((1 - math.log(2)) + (-0.5 + math.log(2)) + 0 + (3 - math.log(4))) / 4,
    "chi_square": (4 + 0.25 + 1 + 16) / 4 - 1,
    "effective_sample_size": 7.5**2 / (4 * 21.25),
}


def means(*parts):
    sums = TokenSums()
    for part in parts:
        metrics = {"entropy": PI[part], "of_micro_batch": PI[part].mean()}
        sums.add(torch.tensor(0.5), PI[part], MU[part], FRESH[part], metrics)
    return sums.means()


@pytest.mark.parametrize(
    "parts",
    [
        [slice(0, 5)],
        [slice(0, 2), slice(2, 5)],
        [slice(4, 5), slice(0, 0), slice(2, 3), slice(3, 4), slice(0, 2)],
    ],
)
def test_however_the_batch_is_split_the_mismatch_is_that_of_its_fresh_tokens(parts):
    found = means(*parts)
    for name, expected in BY_HAND.items():
        assert found[f"mismatch/sampled_{name}"] == pytest.approx(expected, rel=1e-6)
    assert found["train/loss"] == 0.5 * len(parts)
    # A number for a whole micro-batch weighs as its tokens, and that of none nothing.
    for name in ("entropy", "of_micro_batch"):
        assert found[f"train/{name}"] == pytest.approx(float(PI.mean()), rel=1e-6)
    # Of stale tokens alone nothing is said.
    assert not [name for name in means(slice(2, 3)) if name.startswith("mismatch/")]


def test_one_broken_token_shows_in_the_maximum_and_makes_nothing_infinite():
    """Beyond e^20 the ratio is clamped, as it is for every loss."""
    sums = TokenSums()
    mu = torch.tensor([-800.0, -1.0])
    sums.add(torch.tensor(0.0), torch.tensor([0.0, -1.0]), mu, torch.ones(2, dtype=torch.bool), {})
    found = sums.means()
    assert found["mismatch/sampled_max_abs"] == 800
    clamped = math.exp(MAX_LOG_RATIO)
    assert found["mismatch/sampled_kl"] == pytest.approx((clamped - 1 - MAX_LOG_RATIO) / 2)
    assert found["mismatch/sampled_chi_square"] == pytest.approx((clamped**2 + 1) / 2 - 1)
    assert found["mismatch/sampled_effective_sample_size"] == pytest.approx(0.5, rel=1e-6)
