"""A critic's credit of a batch, in float64, however the batch is split, packed and ordered."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from losses.aggregation import token_mean
from losses.gae import gae
from losses.squared_error import squared_error
from rl.learner.critic import Critic, ValueModel, _metrics
from rl.learner.objective import Batch
from rl.learner.value_credit import ValueCredit
from rl.rollouts.plan import plan_batch
from tests.support.forked_groups import forked_groups, plain_credit

SPLITS = [(1, 10_000), (1, 60), (1, 1), (2, 45), (3, 30), (3, 1)]  # ranks, tokens_per_micro_batch
GROUPS = forked_groups()


def value_of(row):
    """Of each completion token, by its id alone: no model is needed to see who sits where."""
    return np.sin(row.token_ids[row.completion_mask].astype(float)).tolist()


def penalty_of(row):
    return (0.1 * np.cos(row.token_ids[row.completion_mask].astype(float))).tolist()


class Engine:
    """Stands in for DeepSpeed's."""

    def __call__(self, token_ids, mask):
        return token_ids[mask].double().sin()

    def eval(self):
        pass

    def train(self):
        pass


def critic(over, *, whiten=False):
    made = Critic.__new__(Critic)
    made._options = ValueModel(
        estimator=partial(gae, gamma=0.9, gae_lambda=0.8),
        loss=partial(squared_error, clip=None),
        optim=None,
        over=over,
        whiten=whiten,
        head_start=0,
    )
    made._engine, made._ranks = Engine(), SimpleNamespace(world=1, any=bool)
    return made


def credited(groups, over, ranks, budget, monkeypatch, *, whiten=False):
    """{(example, member, position): advantage, return, weight}, and the metrics of each rank."""
    batches = plan_batch(
        groups, token_mean, step=0, ranks=ranks, tokens_per_micro_batch=budget, metrics={}
    )
    shares = [(b, [Batch.of(m, torch.device("cpu"), 0) for m in b.micro_batches]) for b in batches]
    made = critic(over, whiten=whiten)

    def credit(batch, micros):
        return made.credit(
            batch, micros, [0.1 * m.token_ids[m.mask].double().cos() for m in micros]
        )

    sent = []  # what each rank sends; in a second round each gets the sum
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sent.append(tensor.clone()))
    for share in shares:
        credit(*share)
    total = torch.stack(sent).sum(0)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.copy_(total))
    results = [credit(*share) for share in shares]
    members = [(g.index, member) for g in groups for member in range(len(g.rollouts))]
    found = {}
    for batch in (b for micros, _ in results for b in micros):
        targets = batch.value_targets
        columns = (batch.advantages, targets.returns, targets.weights)
        numbers = torch.stack(columns, 1).tolist()
        places = zip(batch.rollout_ids.tolist(), batch.positions.tolist(), numbers, strict=True)
        for rollout, position, row in places:
            assert (*members[rollout], position) not in found
            found[(*members[rollout], position)] = row
    return found, [metrics for _, metrics in results]


def by_member(expected):
    return {(i // 3, i % 3, position): numbers for (i, position), numbers in expected.items()}


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_every_token_is_credited_as_in_its_whole_rollout_for_every_split_and_order(
    over, monkeypatch
):
    expected = by_member(
        plain_credit(GROUPS, value_of, penalty_of, gamma=0.9, gae_lambda=0.8, over=over)
    )
    num_states = sum(first for *_, first in expected.values())
    metrics = []
    for seed, (ranks, budget) in enumerate(SPLITS):
        shuffled = random.Random(seed).sample(GROUPS, len(GROUPS))
        found, measured = credited(shuffled, over, ranks, budget, monkeypatch)
        assert expected.keys() <= found.keys()
        for place, (advantage, target, weight) in found.items():
            if place not in expected:  # unscored: it lies in the plan and counts nowhere
                assert place[:2] == (0, 1)
                assert (advantage, weight) == (0, 0)
                continue
            wanted, wanted_return, first = expected[place]
            assert advantage == pytest.approx(wanted, rel=1e-12, abs=1e-12)
            assert target == pytest.approx(wanted_return, rel=1e-12, abs=1e-12)
            assert weight == pytest.approx(first / num_states, rel=1e-12)
        metrics += measured
    assert all(one == pytest.approx(metrics[0], rel=1e-12) for one in metrics)


def test_whitened_advantages_are_those_of_all_ranks_together(monkeypatch):
    plain = plain_credit(GROUPS, value_of, penalty_of, gamma=0.9, gae_lambda=0.8, over="turns")
    numbers = np.array([advantage for advantage, *_ in plain.values()])
    for ranks, budget in SPLITS:
        found, _ = credited(GROUPS, "turns", ranks, budget, monkeypatch, whiten=True)
        for place, (advantage, *_) in by_member(plain).items():
            wanted = (advantage - numbers.mean()) / numbers.std()
            assert found[place][0] == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_what_is_logged_is_of_the_states_alone(monkeypatch):
    expected = plain_credit(GROUPS, value_of, penalty_of, gamma=0.9, gae_lambda=0.8, over="turns")
    returns = np.array([target for _, target, first in expected.values() if first])
    advantages = np.array([advantage for advantage, _, first in expected.values() if first])
    _, (metrics,) = credited(GROUPS, "turns", 1, 60, monkeypatch)
    trained = [rollout for rollout, c in pairs() if c.trains and c.reward is not None]
    lost = sum(p for rollout in trained for row in rollout.rows for p in penalty_of(row))
    assert metrics == pytest.approx(
        {
            "train/return_mean": returns.mean(),
            "train/value_mean": (returns - advantages).mean(),
            "train/explained_variance": 1 - advantages.var() / returns.var(),
            "train/kl_penalty": lost / 10,  # of the rollouts that train
        }
    )


def test_returns_without_differences_have_no_explained_variance():
    ones = torch.ones(1, 2, dtype=torch.float64)
    metrics = _metrics(0 * ones, ValueCredit(ones, ones, ones.bool()))
    assert np.isnan(metrics["train/explained_variance"])


def pairs():
    return [pair for g in GROUPS for pair in zip(g.rollouts, g.credits, strict=True)]
