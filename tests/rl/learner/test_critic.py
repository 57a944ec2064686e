"""The critic: its module, and its steps under DeepSpeed compared with plain torch.

The first tests are of advantages and returns of tokens and of turns, worked by hand.
"""

import functools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from losses.aggregation import token_mean
from losses.gae import gae
from losses.squared_error import squared_error
from rl.learner import value_credit
from rl.learner.critic import CriticSettings, ValueModel, _metrics
from rl.learner.deepspeed_engine import gather
from rl.learner.objective import Batch
from rl.learner.value_credit import ValueCredit, _whiten, rewards_at_tokens
from rl.rollouts.plan import plan_batch
from tests.support.forked_groups import forked_groups
from tests.support.policy_setup import (
    BUDGETS,
    PlainSteps,
    Setup,
    all_same,
    deepspeed_config,
    with_layers,
)
from tests.support.ranks import on_ranks, per_world
from tests.support.tiny_policy import ADAPTER, exact_model, flat, relative_error

# Two turns of 2 and 3 tokens that earn 1 and 2; one turn of 2 tokens that earns 4.
TURNS = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
EXISTS = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
VALUES = [[0.5, 1.0, 1.0, 0.0, 2.0], [1.0, 3.0, 0.0, 0.0, 0.0]]
EARNED = [[1.0, 2.0], [4.0, 0.0]]


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


def credited(over, gamma, gae_lambda, exists=EXISTS, whiten=False, values=VALUES, turns=TURNS):
    exists, turns = torch.as_tensor(exists).bool(), torch.as_tensor(turns).double()
    return value_credit.credit(
        torch.as_tensor(values, dtype=torch.float64),
        turns,
        exists,
        rewards_at_tokens(table(EARNED), turns, exists),
        estimator=partial(gae, gamma=gamma, gae_lambda=gae_lambda),
        over=over,
        whiten=whiten,
    )


@pytest.mark.parametrize(
    ("turns", "earned", "expected"),
    [
        ([0, 0, 2], [1, 2, 3], [0, 3, 3]),  # the second has no token: its reward joins the first's
        ([1, 1, 1], [1, 2, 0], [1, 0, 2]),  # the first has none: the first token of all
        ([0, 0, 1], [1, 2, 4], [0, 1, 6]),  # the last has none: the last token
    ],
)
def test_a_turn_without_tokens_loses_no_reward(turns, earned, expected):
    found = rewards_at_tokens(table([earned]), table([turns]), torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(found, table([expected]), rtol=0, atol=0)


HAND = [
    # r + V' / 2 - V: 0.5 - 0.5, 1.5 - 1, 0 - 1, 1 - 0, 2 - 2; and 1.5 - 1, 4 - 3;
    # from the back, a quarter of the one after added
    ("tokens", [[0.078125, 0.3125, -0.75, 1.0, 0.0], [0.75, 1.0, 0.0, 0.0, 0.0]]),
    # A turn is one step, however long; values 0.5 and 1 at the turns' first tokens:
    # 1 + 0.5 * 1 - 0.5, and 0.25 * 1 added; 2 - 1; and 4 - 1
    ("turns", [[1.25, 1.25, 1.0, 1.0, 1.0], [3.0, 3.0, 0.0, 0.0, 0.0]]),
]
FIRSTS = {"tokens": EXISTS, "turns": [[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]]}


@pytest.mark.parametrize(("over", "advantages"), HAND)
def test_advantages_match_the_table_and_returns_are_those_plus_the_first_value(over, advantages):
    found = credited(over, 0.5, 0.5)
    torch.testing.assert_close(found.advantages, table(advantages), rtol=1e-12, atol=1e-12)
    assert found.states.tolist() == table(FIRSTS[over]).bool().tolist()
    sums = found.advantages + table(VALUES)
    torch.testing.assert_close(found.returns[found.states], sums[found.states])
    # Without any token there are tables of nothing.
    none = torch.zeros(2, 0, dtype=torch.float64)
    empty = credited(over, 0.5, 0.5, exists=none, whiten=True, values=none, turns=none)
    assert empty.advantages.shape == empty.returns.shape == empty.states.shape == (2, 0)


def test_advantages_without_spread_are_no_lesson_and_those_of_a_broken_critic_no_number():
    level = credited("tokens", 1.0, 0.0, exists=[[0] * 5, [1, 0, 0, 0, 0]], whiten=True)
    assert not level.advantages.any()
    small = _whiten(table([[0.0, 6e-6]]), torch.ones(1, 2).bool())  # above rounding errors
    torch.testing.assert_close(small, table([[-1.0, 1.0]]))
    broken = credited("tokens", 1.0, 1.0, values=[[torch.nan] * 5] * 2, whiten=True)
    assert broken.advantages[table(EXISTS).bool()].isnan().all()


def test_returns_without_differences_have_no_explained_variance():
    ones = table([[1.0, 1.0]])
    metrics = _metrics(0 * ones, ValueCredit(ones, ones, ones.bool()))
    assert np.isnan(metrics["train/explained_variance"])


GAMMA, GAE_LAMBDA, RATE = 0.9, 0.8, 0.01
CASES = (("tokens", "one", False), ("turns", "several", True), ("tokens", "rows", False))


class Twin:
    """The value model in float64, a row at a time."""

    def __init__(self, model):
        self.body, width = model.base_model, model.config.hidden_size
        self.head = {
            "weight": torch.zeros(1, width, dtype=torch.float64, requires_grad=True),
            "bias": torch.zeros(1, dtype=torch.float64, requires_grad=True),
        }
        self.parameters = {f"body.{name}": p for name, p in self.body.named_parameters()}
        self.parameters |= {f"head.{name}": p for name, p in self.head.items()}

    @torch.no_grad()
    def load(self, weights):
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def values(self, row):
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        hidden = self.body(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        before = hidden[torch.tensor(row.completion_mask)[1:]]
        return before @ self.head["weight"][0] + self.head["bias"]


class Critics(Setup):
    """Critics of any dtype and stage, on batches of forked rollouts with several turns."""

    def __init__(self, folder, ranks):
        super().__init__(folder, ranks)
        self.groups = [forked_groups(seed) for seed in range(2)]

    def critic(self, dtype, mode, optim, seed=0, *, adapter=False):
        def load():
            model = self.model(dtype, 0 if adapter else seed)  # a base comes from files
            with_layers(model, mode)
            if adapter:
                ADAPTER.attach(model, seed, "base")
            return model.train()

        config = deepspeed_config(mode)
        setting = CriticSettings(load, self.ranks, config, max_steps=10, max_grad_norm=1e9)
        return ValueModel(
            estimator=partial(gae, gamma=GAMMA, gae_lambda=GAE_LAMBDA),
            loss=partial(squared_error, clip=None),
            optim=optim,
            over="tokens",
            whiten=False,
            head_start=0,
        ).start(setting)

    def shares(self, groups, split):
        """Return this rank's batch, and its micro-batches as tensors."""
        batch = plan_batch(
            groups,
            token_mean,
            step=0,
            ranks=self.ranks.world,
            tokens_per_micro_batch=BUDGETS[split],
            metrics={},
        )[self.ranks.rank]
        return batch, [Batch.of(micro, self.ranks.device, 0) for micro in batch.micro_batches]

    def credited(self, critic, groups, split="several"):
        batch, batches = self.shares(groups, split)
        return critic.credit(batch, batches, [])[0]

    def weights(self, critic):
        """Return a copy of what is trained; every rank gathers it."""
        weights = {}
        for name, parameter in critic._engine.module.named_parameters():
            if parameter.requires_grad:
                with gather(critic._engine, [parameter]):
                    weights[name] = parameter.detach().clone()
        return weights


@functools.cache
def critics(setup):
    return Critics(setup.new_folder(), setup.ranks)


@per_world(
    "mode",
    {1: ("zero0", "zero2 compiled"), 2: ("zero1", "zero2 shared", "zero3 scattered checkpointing")},
)
@on_ranks
def test_advantages_and_steps_are_those_of_plain_torch_on_the_whole_batch(setup, mode):
    setup = critics(setup)
    critic = setup.critic("float32", mode, PlainSteps(RATE))
    twin, groups = Twin(exact_model(setup.sources["float32"])), setup.groups[0]
    options = critic._options
    batch, batches = setup.shares(groups, "one")
    assert not any(values.any() for values in critic.values(batches))  # before the first step
    critic.update(0, setup.credited(critic, setup.groups[1]), 1)  # a head that is not zero
    for over, split, whiten in CASES:
        is_last = setup.ranks.rank == setup.ranks.world - 1
        loss = with_metric if is_last else partial(squared_error, clip=None)
        critic._options = replace(options, over=over, loss=loss, whiten=whiten)
        before = setup.weights(critic)
        twin.load(before)
        batch, batches = setup.shares(groups, split)
        penalties = [0.1 * b.token_ids[b.mask].double().cos() for b in batches]
        credited, metrics = critic.credit(batch, batches, penalties)
        with torch.no_grad():
            expected = plain_credit(
                *(groups, lambda row: twin.values(row).tolist(), penalty_of),
                gamma=GAMMA,
                gae_lambda=GAE_LAMBDA,
                over=over,
            )
        numbers = np.array([advantage for advantage, *_ in expected.values()])
        mean, std = (numbers.mean(), numbers.std()) if whiten else (0.0, 1.0)
        for b in credited:
            places = zip(b.rollout_ids.tolist(), b.positions.tolist(), strict=True)
            # A rollout without a score lies in the plan and counts nowhere.
            wanted = [(expected[p][0] - mean) / std if p in expected else 0.0 for p in places]
            atol = 1e-5 * np.abs(numbers).max() / std
            np.testing.assert_allclose(b.advantages.cpu(), wanted, rtol=0, atol=atol)
        assert metrics == pytest.approx(plain_metrics(groups, expected), rel=1e-4)

        stats, after = critic.update(0, credited, 1), setup.weights(critic)
        value = plain_loss(twin, groups, expected)
        gradients = torch.autograd.grad(value, list(twin.parameters.values()))
        wanted = dict(zip(twin.parameters, gradients, strict=True))
        update = {n: (before[n].double() - after[n].double()) / RATE for n in after}
        assert relative_error(update, wanted) < 1e-5
        assert stats["train/value_loss"] == pytest.approx(float(value.detach()), rel=1e-5)
        norm = float(flat(wanted).norm())
        assert norm > 0.01
        assert stats["train/critic_grad_norm"] == pytest.approx(norm, rel=1e-5)
        own = sum(float(b.value_targets.weights.sum()) for b in credited) if is_last else 0.0
        assert stats["train/odd"] == pytest.approx(setup.ranks.sum(own))


def plain_credit(groups, values, penalties, *, gamma, gae_lambda, over):
    """Return advantage, return, and whether it begins a step, for each token that trains.

    It uses no tables, plans or ranks, but lists, one rollout after the other. `values` and
    `penalties` return numbers of a row's completion tokens.
    """
    pairs = [pair for g in groups for pair in zip(g.rollouts, g.credits, strict=True)]
    result = {}  # rollout of the batch, position among its completion tokens -> these three
    for i, (rollout, credit) in enumerate(pairs):
        if credit.reward is None or not credit.trains:
            continue
        value = [v for row in rollout.rows for v in values(row)]
        turns = [int(t) for row in rollout.rows for t in row.turns if t >= 0]
        reward = [0.0] * len(turns)
        for turn, earned in enumerate(credit.turn_rewards):
            reward[len(turns) - 1 - turns[::-1].index(turn)] += earned
        lost = [p for row in rollout.rows for p in penalties(row)]
        reward = [r - p for r, p in zip(reward, lost, strict=True)]
        steps = list(range(len(turns))) if over == "tokens" else turns
        firsts = [steps.index(step) for step in sorted(set(steps))]
        advantage, after, by_step = 0.0, 0.0, {}
        for first in reversed(firsts):
            gained = sum(r for r, s in zip(reward, steps, strict=True) if s == steps[first])
            delta = gained + gamma * after - value[first]
            advantage = delta + gamma * gae_lambda * advantage
            after = value[first]
            by_step[steps[first]] = (advantage, advantage + value[first])
        for position, step in enumerate(steps):
            result[i, position] = (*by_step[step], position in firsts)
    return result


def with_metric(*values):
    """A value loss of one rank only that has a metric more than that of the other ranks."""
    return replace(squared_error(*values, clip=None), metrics={"odd": torch.ones(())})


def plain_loss(twin, groups, expected):
    """Return the mean over the states of the whole batch, one state after the other."""
    losses, rollouts = [], [rollout for group in groups for rollout in group.rollouts]
    for i, rollout in enumerate(rollouts):
        values = torch.cat([twin.values(row) for row in rollout.rows])
        for position, value in enumerate(values):
            _, target, first = expected.get((i, position), (0.0, 0.0, False))
            losses += [(value - target) ** 2 / 2] if first else []
    return torch.stack(losses).mean()


def plain_metrics(groups, expected):
    """Return what is logged, which is of the states alone."""
    states = [(target, advantage) for advantage, target, first in expected.values() if first]
    returns, advantages = np.array(states).T
    pairs = [pair for g in groups for pair in zip(g.rollouts, g.credits, strict=True)]
    trained = [rollout for rollout, c in pairs if c.trains and c.reward is not None]
    penalties = [p for rollout in trained for row in rollout.rows for p in penalty_of(row)]
    return {
        "train/return_mean": returns.mean(),
        "train/value_mean": (returns - advantages).mean(),
        "train/explained_variance": 1 - advantages.var() / returns.var(),
        "train/kl_penalty": sum(penalties) / len(trained),
    }


def penalty_of(row):
    return (0.1 * torch.tensor(row.token_ids)[row.completion_mask].double().cos()).tolist()


@per_world(
    "dtype, mode, adapter",
    {2: (("bfloat16", "zero1", True), ("float32", "zero3 scattered", False))},
)
@on_ranks
def test_a_loaded_critic_skips_bad_batches_and_takes_the_same_next_step(
    setup, dtype, mode, adapter
):
    setup = critics(setup)
    critic, folder = setup.critic(dtype, mode, setup.adamw(), adapter=adapter), setup.new_folder()
    # Its sums and master copies are then float32, as test_policy.py shows of the same engine.
    assert critic._engine.bfloat16_enabled() == (dtype == "bfloat16")
    for groups in setup.groups:
        critic.update(0, setup.credited(critic, groups), 1)
    middle = setup.weights(critic)
    assert all("lora_" in name or "head." in name for name in middle) == adapter
    critic.save(folder)
    stats = critic.update(2, setup.credited(critic, setup.groups[0]), 2)
    end = setup.weights(critic)

    other = setup.critic(dtype, mode, setup.adamw(), seed=1, adapter=adapter)
    other.load(folder)
    # A return that is not finite, on the last rank alone, changes nothing on any rank.
    credited = setup.credited(other, setup.groups[0])
    if setup.ranks.rank == setup.ranks.world - 1:
        targets = credited[0].value_targets
        broken = replace(targets, returns=targets.returns + math.inf)
        credited[0] = replace(credited[0], value_targets=broken)
    assert other.update(2, credited, 1)["train/critic_skipped"] == 1
    assert other.update(2, setup.credited(other, []), 1) == {}  # without a state it is no step
    assert all_same(setup.weights(other), middle)
    assert other.update(2, setup.credited(other, setup.groups[0]), 2) == stats
    assert all_same(setup.weights(other), end)


@pytest.mark.parametrize("world", [1])
@on_ranks
def test_a_learner_with_a_critic_skips_with_it_and_resumes_it(setup):
    """test_learner.py has the critic's head start."""
    setup = critics(setup)
    run_folder, (batch, _) = setup.run_folder(), setup.shares(setup.groups[0], "several")
    ppo = ("loss=ppo", "critic.head_start=1", "kl=k1", "updates_per_batch=2", "max_steps=3")
    one, other = (setup.learner(run_folder, "optim.learning_rate=1e-3", *ppo) for _ in range(2))
    infinite = replace(batch, turn_rewards=batch.turn_rewards + np.float32(math.inf))
    assert one.update(infinite)["train/skipped"] == 1  # the critic skips, and the policy waits
    for step in range(2):
        one.update(replace(batch, step=step))
    one.save(run_folder.path)
    expected = one.update(replace(batch, step=2))
    other.load(run_folder.path)
    assert other.update(replace(batch, step=2)) == expected
