"""Credits of groups in which several roles play, worked by hand."""

from functools import partial

import numpy as np
import pytest

from envs.episode import Example, StopReason
from losses.advantages import group_mean, none, rloo, turn_group_mean
from losses.aggregation import prompt_mean
from rl.records import Group, Rollout, TrainingRow
from rl.rollouts import truncation
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.compared import compared_columns
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.plan import rollout_fields, weighted_rows
from rl.rollouts.service import trained_line

EXAMPLE = Example(0, "e", [])
WEIGHTS = {"won": 1.0}
to_go = partial(turn_group_mean, discount=1.0)


def rollout(role, reward, *, by_turn=(), num_turns=1):
    """Return a rollout with one token per turn."""
    turns = np.array([-1, *range(max(len(by_turn), num_turns))], np.int32)
    zeros = np.zeros(len(turns), np.float32)
    row = TrainingRow(turns + 10, turns >= 0, zeros, turns.clip(max=0), turns)
    return Rollout(
        *((row,), [], reward, {} if reward is None else {"won": reward}, StopReason.STOP),
        turns=len(turns) - 1,
        generation_time=0.0,
        turn_rewards={"won": by_turn} if by_turn else {},
        role=role,
    )


def credit(rollouts, advantage=group_mean, *, normalise_each=False, length_penalty=0.0, by_turn=0):
    shaping = RewardShaping(normalise_each=normalise_each, length_penalty=length_penalty)
    return GroupCredit(
        truncation.keep, shaping, advantage, lambda _: WEIGHTS, per_turn=bool(by_turn)
    )(EXAMPLE, rollouts)


A, B = partial(rollout, "a"), partial(rollout, "b")


@pytest.mark.parametrize(
    ("rollouts", "advantage", "expected"),
    [
        # a: 1, 0 of mean 1/2; b: 0.25, 0.75 of mean 1/2
        ([A(1.0), B(0.25), A(0.0), B(0.75)], group_mean, [0.5, -0.25, -0.5, 0.25]),
        # In any order, and a role that spoke in one episode only has nothing to compare.
        ([B(0.25), A(1.0), A(0.0)], group_mean, [0.0, 0.5, -0.5]),
        # An unscored rollout is outside the baseline of its role.
        ([A(1.0), B(None), A(0.0), B(3.0), B(1.0)], group_mean, [0.5, 0.0, -0.5, 1.0, -1.0]),
        # A role that nobody scored.
        ([A(1.0), B(None), A(0.0), B(None)], group_mean, [0.5, 0.0, -0.5, 0.0]),
        # Zero-sum: all of role a won, which is no spread within a role.
        ([A(1.0), B(-1.0), A(1.0), B(-1.0)], group_mean, [0.0, 0.0, 0.0, 0.0]),
        # rloo: minus the mean of the others of the role
        ([A(1.0), B(2.0), A(0.0), B(4.0), B(6.0)], rloo, [1.0, -3.0, -1.0, 0.0, 3.0]),
        ([A(1.0), B(2.0)], none, [1.0, 2.0]),
    ],
)
@pytest.mark.parametrize("normalise_each", [False, True])
def test_rollouts_are_compared_within_their_role(rollouts, advantage, expected, normalise_each):
    made = credit(rollouts, advantage, normalise_each=normalise_each)
    assert [c.advantages for c in made] == [(number,) for number in expected]
    assert [c.trains for c in made] == [r.reward is not None for r in rollouts]


def test_turns_are_compared_within_their_role():
    rollouts = [
        A(3.0, by_turn=(1.0, 2.0)),
        B(4.0, by_turn=(4.0,)),
        A(1.0, by_turn=(1.0, 0.0)),
        B(8.0, by_turn=(5.0, 3.0)),
        B(None, num_turns=2),
    ]
    made = credit(rollouts, to_go, by_turn=1)
    # a: to go 3, 2 and 1, 0. b: to go 4 and 8, 3; the second turn of b has no other.
    assert [c.advantages for c in made] == [(1.0, 1.0), (-2.0,), (-1.0, -1.0), (2.0, 0.0), (0.0,)]


def test_penalties_change_only_the_comparison_of_their_role():
    made = credit([A(1.0, num_turns=3), B(1.0), A(1.0), B(1.0)], length_penalty=0.5)
    # a: 1 - 1.5 and 1 - 0.5, of mean 0; b: 0.5 and 0.5
    assert [c.advantages for c in made] == [(-0.5,), (0.0,), (0.5,), (0.0,)]


def group(index, *rollouts):
    return Group(index, EXAMPLE, 0, rollouts, tuple(credit(rollouts)))


def test_a_group_has_spread_only_within_a_role():
    flat = group(0, A(1.0), B(0.0), A(1.0), B(0.0))
    assert compared_columns(flat) == [[1.0, 1.0], [0.0, 0.0]]
    bounds = {"min_reward_variance": None, "min_reward": None, "max_reward": None}
    assert DifficultyBuffer(min_spread=0.1, **bounds).why_useless(flat) == "zero_spread"
    assert batch_metrics([flat], 0)["rollout/zero_spread"] == 1.0
    assert batch_metrics([group(0, A(1.0), A(0.0), B(1.0))], 0)["rollout/zero_spread"] == 0.0


def test_a_batch_names_the_reward_of_each_role_and_knows_which_rollouts_were_compared():
    groups = [group(0, A(1.0), B(0.0), A(0.0), B(1.0), B(None)), group(1, B(1.0), A(1.0))]
    metrics = batch_metrics(groups, 0)
    assert metrics["role/a/reward"] == pytest.approx(2 / 3)
    assert metrics["role/b/reward"] == pytest.approx(2 / 3)
    fields = rollout_fields(groups)
    assert fields["group_ids"].tolist() == [0, 1, 0, 1, 1, 2, 3]
    # Prompts of different roles differ: 4 of them, and a token's weight is 1 / (4 * its tokens).
    rows = weighted_rows(groups, prompt_mean)
    weights = [float(row.token_weights.max()) for row in rows]
    assert weights == [1 / 8] * 4 + [1 / 4] * 2
    lines = [trained_line(groups[0], r, c, True) for r, c in zip(groups[0].rollouts,
             groups[0].credits, strict=True)]  # fmt: skip
    assert [line["role"] for line in lines] == ["a", "b", "a", "b", "b"]
