"""Credits by turn and by role worked by hand, and the numbers of their tokens."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from envs.episode import StopReason
from losses.advantages import group_mean, rloo, turn_group_mean
from losses.aggregation import prompt_mean, token_mean, turn_mean
from rl.learner.objective import Batch
from rl.rollouts import truncation
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.compared import compared_columns
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.plan import plan_batch, rollout_fields, weighted_rows
from rl.rollouts.service import train_line
from tests.support import rollouts as support
from tests.support.rollouts import EXAMPLE, group_credit, row

WEIGHTS = {"step": 2.0, "final": 1.0, "won": 1.0}
to_go = partial(turn_group_mean, discount=1.0)


def rollout(steps, final, *rows, stop=StopReason.STOP):
    """Return a rollout with rewards by turn, of weight 2, and one of the episode."""
    rewards = {"step": sum(steps), "final": final}
    fields = {"turns": len(steps), "turn_rewards": {"step": tuple(steps)}}
    rows = rows or (row(-1, *range(len(steps))),)
    return support.rollout(2 * sum(steps) + final, *rows, stop=stop, fields=fields, **rewards)


def credit(rollouts, advantage=to_go, *, per_turn=True, **options):
    return group_credit(advantage, per_turn=per_turn, weights=WEIGHTS, **options)(EXAMPLE, rollouts)


def group(rollouts, advantage=to_go, *, per_turn=True, index=0):
    return support.group(rollouts, credit(rollouts, advantage, per_turn=per_turn), index)


TWO = [rollout([1.0, 0.5], 3.0), rollout([0.0, 0.5], 1.0)]


def test_turns_are_compared_with_the_same_turns_of_the_group():
    # To go: 6, 4 and 2, 2.
    assert [c.advantages for c in credit(TWO)] == [(2.0, 1.0), (-2.0, -1.0)]
    # By name: step, weight 2, to go 1.5, 0.5 and 0.5, 0.5; final 3, 3 and 1, 1.
    named = credit(TWO, normalise_each=True)
    assert [c.advantages for c in named] == [(2 * 0.5 + 1, 1.0), (-2.0, -1.0)]
    # An advantage of whole rollouts reads the sum of the turns.
    whole = credit(TWO, group_mean, per_turn=False)
    assert [c.advantages for c in whole] == [(2.0,), (-2.0,)]
    assert [c.turn_rewards for c in whole] == [(2.0, 4.0), (0.0, 2.0)]


def test_truncation_and_length_penalty_change_the_last_turn():
    cut = rollout([1.0, 0.5], 3.0, stop=StopReason.MAX_TOKENS)
    (zeroed,) = credit([cut], cut=truncation.zero_reward)
    assert (zeroed.reward, zeroed.turn_rewards) == (0.0, (2.0, -2.0))
    (shorter,) = credit([cut], length_penalty=0.25)  # of two tokens
    assert (shorter.reward, shorter.turn_rewards) == (5.5, (2.0, 3.5))
    (dropped, kept) = credit([cut, rollout([0.0], 1.0)], cut=truncation.drop)
    assert (dropped.reward, dropped.turn_rewards, dropped.advantages) == (None, (), (0.0,))
    assert (kept.trains, kept.advantages) == (True, (0.0,))  # the only scored rollout


def test_infinite_rewards_cost_only_their_own_rollout_and_every_sampled_turn_counts():
    infinite = replace(
        rollout([1.0, 0.0], 0.0),
        reward=None,
        rewards={"step": math.nan, "final": 0.0},
        turn_rewards={"step": (math.inf, -math.inf)},
    )
    made = credit([rollout([1.0], 0.0), infinite, rollout([0.0], 0.0)], normalise_each=True)
    assert [c.advantages for c in made] == [(1.0,), (0.0,), (-1.0,)]
    # The environment reports only one turn.
    played = support.rollout(1.0, row(-1, 0, 1, 2), fields={"turns": 1})
    (made,) = credit([played], lambda group: [[*turns] for turns in group.turn_rewards])
    assert made.turn_rewards == (0.0, 0.0, 1.0)


# Three turns, of which the third forked: rows of turns 0 (2 tokens) and 1 (1), and of turn 2 (3).
FORKED = rollout([1.0, 0.0, 0.0], 0.0, row(-1, 0, 0, -1, 1), row(-1, -1, 2, 2, 2))
SHORT = rollout([0.0], 0.0, row(-1, -1, 0))
PAIR = group([FORKED, SHORT])
NUMBERED = group([FORKED, SHORT], lambda _: [[5.0, 6.0, 7.0], [8.0]])


def test_each_token_gets_the_number_of_its_turn_in_every_row():
    rows = weighted_rows([NUMBERED], token_mean)
    found = [r.advantages.tolist() for r in rows]
    assert found == [[0, 5, 5, 0, 6], [0, 0, 7, 7, 7], [8, 8, 8]]
    assert [r.first_position for r in rows] == [0, 3, 0]
    line = train_line(NUMBERED, FORKED, NUMBERED.credits[0], True)
    assert (line["advantage"], line["turn_rewards"]) == ((5, 6, 7), {"step": (1.0, 0.0, 0.0)})
    rows = weighted_rows([PAIR], turn_mean, per_turn=True)
    # Four turns, of 2, 1, 3 and 1 tokens.
    expected = [[0, 1 / 8, 1 / 8, 0, 1 / 4], [0, 0, 1 / 12, 1 / 12, 1 / 12], [1 / 4] * 3]
    assert [r.token_weights.tolist() for r in rows] == list(map(pytest.approx, expected))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [3, 10, 99])
def test_the_columns_of_a_token_do_not_depend_on_the_split(ranks, budget):
    settings = {"step": 3, "ranks": ranks, "tokens_per_micro_batch": budget, "metrics": {}}
    shares = plan_batch([NUMBERED], turn_mean, per_turn=True, **settings)
    found = set()
    for micro in (micro for share in shares for micro in share.micro_batches):
        batch = Batch.of(micro, torch.device("cpu"), 3)
        columns = (batch.rollout_ids, batch.positions, batch.turns, batch.advantages)
        found |= set(zip(*(column.tolist() for column in columns), strict=True))
        assert set(batch.staleness.tolist()) <= {3}
    assert found == {
        *((0, 0, 0, 5.0), (0, 1, 0, 5.0), (0, 2, 1, 6.0)),
        *((0, 3, 2, 7.0), (0, 4, 2, 7.0), (0, 5, 2, 7.0), (1, 0, 0, 8.0)),
    }
    told = rollout_fields([NUMBERED])
    np.testing.assert_array_equal(told["turn_rewards"], [[2, 0, 0], [0, np.nan, np.nan]])
    assert told["lengths"].tolist() == [6, 1]


def of_role(role, reward, *by_turn, num_turns=1):
    """Return a rollout with one token per turn."""
    won = {} if reward is None else {"won": reward}
    fields = {"role": role, "turn_rewards": {"won": by_turn} if by_turn else {}}
    row_of_turns = row(-1, *range(max(len(by_turn), num_turns)))
    return support.rollout(reward, row_of_turns, fields=fields, **won)


A, B = partial(of_role, "a"), partial(of_role, "b")


@pytest.mark.parametrize(
    ("rollouts", "advantage", "expected"),
    [
        # a: 1, 0 of mean 1/2; b: 0.25, 0.75 of mean 1/2
        ([A(1.0), B(0.25), A(0.0), B(0.75)], group_mean, [0.5, -0.25, -0.5, 0.25]),
        # In any order, and a role that spoke in one episode only has nothing to compare.
        ([B(0.25), A(1.0), A(0.0)], group_mean, [0.0, 0.5, -0.5]),
        # An unscored rollout is outside the baseline of its role.
        ([A(1.0), B(None), A(0.0), B(3.0), B(1.0)], group_mean, [0.5, 0.0, -0.5, 1.0, -1.0]),
        # The environment scored no rollout of this role.
        ([A(1.0), B(None), A(0.0), B(None)], group_mean, [0.5, 0.0, -0.5, 0.0]),
        # rloo: minus the mean of the others of the role
        ([A(1.0), B(2.0), A(0.0), B(4.0), B(6.0)], rloo, [1.0, -3.0, -1.0, 0.0, 3.0]),
    ],
)
@pytest.mark.parametrize("normalise_each", [False, True])
def test_rollouts_are_compared_within_their_role(rollouts, advantage, expected, normalise_each):
    weights = {"won": 1.0}
    made = group_credit(advantage, normalise_each=normalise_each, weights=weights)(
        EXAMPLE, rollouts
    )
    assert [c.advantages for c in made] == [(number,) for number in expected]
    assert [c.trains for c in made] == [r.reward is not None for r in rollouts]


whole_group = partial(group, advantage=group_mean, per_turn=False)


def test_a_batch_names_the_reward_of_each_role_and_compares_only_within_a_role():
    flat = whole_group([A(1.0), B(0.0), A(1.0), B(0.0)])
    assert compared_columns(flat) == [[1.0, 1.0], [0.0, 0.0]]
    bounds = dict.fromkeys(("min_reward_variance", "min_reward", "max_reward"))
    assert DifficultyBuffer(min_spread=0.1, **bounds).why_useless(flat) == "zero_spread"
    assert batch_metrics([flat], 0)["rollout/zero_spread"] == 1.0
    varied = whole_group([A(1.0), A(0.0), B(1.0)])
    assert batch_metrics([varied], 0)["rollout/zero_spread"] == 0.0
    first = whole_group([A(1.0), B(0.0), A(0.0), B(1.0), B(None)])
    groups = [first, whole_group([B(1.0), A(1.0)], index=1)]
    metrics = batch_metrics(groups, 0)
    assert metrics["role/a/reward"] == metrics["role/b/reward"] == pytest.approx(2 / 3)
    assert rollout_fields(groups)["group_ids"].tolist() == [0, 1, 0, 1, 1, 2, 3]
    # Prompts of different roles differ: 4 of them, and a token's weight is 1 / (4 * its tokens).
    rows = weighted_rows(groups, prompt_mean)
    assert [row.token_weights.max() for row in rows] == [1 / 8] * 4 + [1 / 4] * 2
    pairs = zip(first.rollouts, first.credits, strict=True)
    assert [train_line(first, *pair, True)["role"] for pair in pairs] == [*"ababb"]
