"""How beta follows the divergence, and advantages of rewards minus the divergence, by hand."""

import math
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from envs.episode import Example, StopReason
from losses.advantages import group_mean, group_zscore, none
from losses.aggregation import token_mean
from losses.kl import k1
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import Scored
from rl.learner.preparation import Preparation, relative_penalties
from rl.records import Credit, Group, Rollout, TrainingRow
from rl.rollouts.plan import plan_batch


def penalty(target_kl: float | None, beta: float = 0.5) -> KLPenalty:
    return KLPenalty(estimator=k1, beta=beta, place="loss", target_kl=target_kl)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.04, 1.0),
        (0.042, 1.005),  # 5 % above the target
        (0.038, 0.995),
        (0.048, 1.02),  # 20 % above, where the clip begins
        (0.032, 0.98),
        (4.0, 1.02),
        (math.inf, 1.02),
        (0.0, 0.98),
        (-1.0, 0.98),  # k1 may be negative
    ],
)
def test_beta_follows_the_divergence_by_at_most_two_percent_a_step(kl, factor):
    assert penalty(0.04).next_beta(0.5, kl) == pytest.approx(0.5 * factor, rel=1e-12)


@pytest.mark.parametrize(("target_kl", "kl"), [(None, 100.0), (0.04, math.nan)])
def test_beta_stays_without_a_target_and_after_a_skipped_step(target_kl, kl):
    assert penalty(target_kl).next_beta(0.5, kl) == 0.5


@pytest.mark.parametrize(("beta", "acts"), [(0.0, False), (1e-6, True)])
def test_there_is_a_penalty_if_beta_is_above_zero(beta, acts):
    assert penalty(None, beta).acts == acts


# Two rollouts; all right, one masked and one without a score; one alone.
LOST = np.array([0.5, 0.0, 0.005, -0.003, 0.0, 100.0, 3.0])
COUNTS = np.array([True, True, True, True, False, False, True])
GROUP_IDS = np.array([0, 0, 1, 1, 1, 1, 2], np.int32)


@pytest.mark.parametrize(
    ("group_ids", "expected"),
    [
        (GROUP_IDS, [0.25, -0.25, 0.004, -0.004, 0.0, 0.0, 0.0]),
        (None, [0.5, 0.0, 0.005, -0.003, 0.0, 0.0, 3.0]),
    ],
    ids=["compared", "without a baseline"],
)
def test_an_advantage_loses_its_penalty_minus_the_mean_of_the_scored_rollouts(group_ids, expected):
    assert relative_penalties(LOST, COUNTS, group_ids) == pytest.approx(expected, abs=1e-12)


class SameDivergences:
    """A policy on one rank whose log pi - log ref of each token is given, for `Nothing`."""

    class ranks:
        device = torch.device("cpu")

    def __init__(self, divergences):
        self.divergences = torch.tensor(divergences)

    def score(self, batch):
        return self.divergences[batch.rollout_ids]


class Nothing:
    """A reference to which all tokens are certain."""

    def score(self, batches):
        return [Scored(torch.zeros(int(rows.mask.sum()))) for rows in batches]

    def metrics(self):
        return {}


def penalised(rewards, trains, divergences, advantage, monkeypatch):
    """Advantages by rollout, of one group whose rollouts have two tokens, at beta 0.5."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    row = TrainingRow(
        np.array([7, 8, 9], np.int32),
        np.array([False, True, True]),
        np.zeros(3, np.float32),
        np.array([-1, 0, 0], np.int32),
        np.array([-1, 0, 0], np.int32),
    )
    credits = tuple(
        Credit(r, (a,), t) for r, a, t in zip(rewards, advantage(rewards), trains, strict=True)
    )
    rollouts = tuple(Rollout((row,), [], r, {}, StopReason.STOP, 1, 0.0) for r in rewards)
    group = Group(0, Example(0, "e", []), 0, rollouts, credits)
    (batch,) = plan_batch(
        [group], token_mean, step=0, ranks=1, tokens_per_micro_batch=99, metrics={}
    )
    policy = SameDivergences(divergences)
    # The present beta counts, not the first.
    kl = KLPenalty(estimator=k1, beta=9.0, place="reward", target_kl=None)
    prepare = Preparation(
        policy, Nothing(), keeps_old=False, kl=kl, compared=advantage([1.0]) == [0.0]
    )
    batches, _ = prepare(batch, 0.5)
    pairs = [zip(b.rollout_ids.tolist(), b.advantages.tolist(), strict=True) for b in batches]
    return dict(chain(*pairs))


zscore = partial(group_zscore, epsilon=0.0)
HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("advantage", "rewards", "trains", "divergences", "expected"),
    [
        # All right: nothing but the divergence, 0.5 * 2 tokens * 0.005, tells them apart.
        (zscore, [1.0, 1.0], [True, True], [0.005, -0.005], {0: -0.005, 1: 0.005}),
        (group_mean, [1.0, 1.0], [True, True], [0.005, -0.005], {0: -0.005, 1: 0.005}),
        # One right: a spread of rewards, and the penalty in units of its own.
        (zscore, [1.0, 0.0], [True, True], [0.2, 0.0], {0: HALF - 0.1, 1: -HALF + 0.1}),
        (group_mean, [1.0, 0.0], [True, True], [0.2, 0.0], {0: 0.4, 1: -0.4}),
        # The third is cut off and masked: its reward stays in the baseline, and nothing more.
        (group_mean, [1.0, 1.0, 0.1], [True, True, False], [0.2, 0.0, 9.0], {0: 0.2, 1: 0.4}),
        (none, [1.0, 0.5], [True, True], [0.2, -0.1], {0: 0.8, 1: 0.6}),
    ],
)
def test_a_penalty_in_the_reward_by_hand(
    advantage, rewards, trains, divergences, expected, monkeypatch
):
    assert penalised(rewards, trains, divergences, advantage, monkeypatch) == pytest.approx(
        expected, abs=1e-6
    )
