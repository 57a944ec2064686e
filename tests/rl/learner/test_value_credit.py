"""Advantages and returns of tokens and of turns against tables worked by hand."""

from functools import partial

import numpy as np
import pytest
import torch

from losses.gae import gae
from rl.learner.critic import _metrics
from rl.learner.value_credit import ValueCredit, _whiten, credit, rewards_at_tokens

# Two turns of 2 and 3 tokens that earn 1 and 2; one turn of 2 tokens that earns 4.
TURNS = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
EXISTS = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
VALUES = [[0.5, 1.0, 1.0, 0.0, 2.0], [1.0, 3.0, 0.0, 0.0, 0.0]]
EARNED = [[1.0, 2.0], [4.0, 0.0]]


def table(rows):
    return torch.tensor(rows, dtype=torch.float64)


def credited(over, gamma, gae_lambda, exists=EXISTS, whiten=False, values=VALUES, turns=TURNS):
    exists, turns = torch.as_tensor(exists).bool(), torch.as_tensor(turns).double()
    return credit(
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


@pytest.mark.parametrize("over", ["tokens", "turns"])
def test_a_rollout_that_does_not_count_stays_out_of_everything(over):
    alone = credited(over, 1.0, 1.0, exists=[EXISTS[0], [0] * 5], whiten=True)
    known = credited(over, 1.0, 1.0).advantages[0]
    expected = (known - known.mean()) / known.std(correction=0)
    torch.testing.assert_close(alone.advantages[0], expected, rtol=1e-12, atol=1e-12)
    assert not alone.advantages[1].any()
    assert not alone.states[1].any()


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
