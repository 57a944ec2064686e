"""Losses that read entropy or staleness, against numbers worked by hand, one row per branch."""

from functools import partial

import pytest
import torch

from losses.decoupled_ppo import decoupled_ppo
from losses.top_entropy import is_highest, top_entropy

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def test_only_the_tokens_of_highest_entropy_of_each_sequence_train(check_table):
    rows = [  # PPO's clip where it is among the ceil(0.4 n) highest entropies of its sequence
        (1 / 2, 1 / 8, -2.0, 6.0, 0.0),  # 0: the first of five, bounded by dual_clip
        (1 / 2, 1 / 4, -1.0, 0.0, 0.0),  # 1: the second of three, 2 are in, but see below
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0),  # 0: the second of five, clipped
        (1 / 2, 1 / 4, -1.0, 0.0, 0.0),  # 0: the third of five: out
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5),  # 1: the first of three
        (1 / 2, 1 / 2, -3.0, 0.0, 0.0),  # 0: out
        (1 / 2, 1 / 2, 1.0, 0.0, 0.0),  # 0: out
        (1 / 2, 1 / 2, 2.0, -2.0, -2.0),  # 1: the second of three
    ]
    check_table(
        partial(top_entropy, fraction=0.4, **CLIP, dual_clip=3.0),
        rows,
        sequence_ids=[0, 1, 0, 0, 1, 0, 0, 1],
        others={"entropies": torch.tensor([9.0, 0.1, 8.0, 2.0, 3.0, 1.0, 0.0, 0.5])},
        kept_fraction=[1, 0, 1, 0, 1, 0, 0, 1],
        clip_fraction=[1, 0, 1, 0, 0, 0, 0, 0],
        clip_fraction_low=[0, 0, 0, 0, 0, 0, 0, 0],
        clip_fraction_high=[0, 0, 1, 0, 0, 0, 0, 0],
        clip_fraction_dual=[1, 0, 0, 0, 0, 0, 0, 0],
    )


@pytest.mark.parametrize(
    ("entropies", "fraction", "expected"),
    [
        ([1.0, 1.0, 0.0, 0.0], 0.25, [True, True, False, False]),  # ties are kept
        ([0.0, 1.0, 1.0, 0.0], 0.5, [False, True, True, False]),
        ([0.3], 0.01, [True]),  # at least one
        ([3.0, 2.0, 1.0], 1.0, [True] * 3),
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


def test_the_anchor_of_staler_tokens_is_closer_to_the_policy(check_table):
    rows = [  # staleness s: prox = mu^(1 / (s + 1)) * pi^(s / (s + 1))
        (1 / 2, 1 / 4, -1.0, 2.0, 2.0),  # s 0: prox mu, weight 1, ratio 2
        (1 / 2, 1 / 4, 1.0, -1.28, 0.0),  # s 0: clipped, as PPO's
        (1 / 4, 1 / 2, -1.0, 0.8, 0.0),  # s 0: clipped below
        # s 1: pi / mu = 4, prox half way: weight 2, ratio 2, clipped at 1.28
        (1 / 2, 1 / 8, 1.0, -2.56, 0.0),
        (1 / 2, 1 / 8, -1.0, 4.0, 4.0),  # 2 * 2
        # s 3: pi / mu = 2^-4, prox three quarters of the way: weight 1/8, ratio 1/2
        (1 / 32, 1 / 2, 1.0, -1 / 16, -1 / 16),
        (1 / 32, 1 / 2, -1.0, 0.1, 0.0),  # 1/8 * 0.8
        # s 3: pi / mu = 2^4: weight 8 -> 5, ratio 2
        (1 / 2, 1 / 32, -1.0, 10.0, 10.0),
        (1 / 2, 1 / 4, 0.0, 0.0, 0.0),
    ]
    check_table(
        partial(decoupled_ppo, **CLIP, weight_cap=5.0),
        rows,
        others={"staleness": torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 0])},
        clip_fraction=[0, 1, 1, 1, 0, 0, 1, 0, 0],
        proximal_weight=[1, 1, 1, 2, 2, 1 / 8, 1 / 8, 8, 1],
        weight_capped=[0, 0, 0, 0, 0, 0, 0, 1, 0],
    )


def test_the_policy_before_the_first_update_is_the_anchor_if_it_is_known(check_table):
    rows = [  # old is 1/4: weight old / mu, ratio pi / old, whatever the staleness
        (1 / 2, 1 / 8, -1.0, 4.0, 4.0),  # 2 * 2
        (1 / 2, 1 / 8, 1.0, -2.56, 0.0),  # 2 * 1.28
        (1 / 4, 1 / 2, 1.0, -0.5, -0.5),  # 1/2 * 1
    ]
    check_table(
        partial(decoupled_ppo, **CLIP, weight_cap=5.0),
        rows,
        others={
            "staleness": torch.tensor([0, 3, 1]),
            "old_logprobs": torch.full((3,), 0.25, dtype=torch.float64).log(),
        },
        clip_fraction=[0, 1, 0],
        proximal_weight=[2, 2, 1 / 2],
        weight_capped=[0, 0, 0],
    )
