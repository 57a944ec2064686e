"""Credits by turn worked by hand, and the numbers of their tokens."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from envs.episode import Example, StopReason
from losses.advantages import group_mean, turn_group_mean
from losses.aggregation import token_mean, turn_mean
from rl.learner.objective import Batch
from rl.records import Group, Rollout, TrainingRow
from rl.rollouts import truncation
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.plan import plan_batch, rollout_fields, weighted_rows
from rl.rollouts.service import trained_line
from rl.runtime.failure import RunFailed
from rl.runtime.files import json_line

EXAMPLE = Example(0, "e", [])
SUMMED = RewardShaping(normalise_each=False, length_penalty=0.0)
EACH = RewardShaping(normalise_each=True, length_penalty=0.0)
WEIGHTS = {"step": 2.0, "final": 1.0}
to_go = partial(turn_group_mean, discount=1.0)


def row(*turns):
    """Return a row whose tokens belong to these turns; -1: not sampled."""
    numbers = np.array(turns, np.int32)
    logprobs = np.zeros(len(numbers), np.float32)
    return TrainingRow(numbers + 10, numbers >= 0, logprobs, numbers.clip(max=0), numbers)


def rollout(steps, final, *rows, stop=StopReason.STOP):
    """Return a rollout with rewards by turn, of weight 2, and one of the episode."""
    return Rollout(
        rows or (row(-1, *range(len(steps))),),
        [],
        2 * sum(steps) + final,
        {"step": sum(steps), "final": final},
        stop,
        turns=len(steps),
        generation_time=0.0,
        turn_rewards={"step": tuple(steps)},
    )


def credit(rollouts, advantage=to_go, *, shaping=SUMMED, cut=truncation.keep, per_turn=True):
    return GroupCredit(cut, shaping, advantage, lambda _: WEIGHTS, per_turn)(EXAMPLE, rollouts)


def test_turns_are_compared_with_the_same_turns_of_the_group():
    made = credit([rollout([1.0, 0.5], 3.0), rollout([0.0, 0.5], 1.0)])
    # To go: 6, 4 and 2, 2.
    assert [c.advantages for c in made] == [(2.0, 1.0), (-2.0, -1.0)]


def test_an_advantage_of_whole_rollouts_reads_the_sum_of_the_turns():
    made = credit([rollout([1.0, 0.5], 3.0), rollout([0.0, 0.5], 1.0)], group_mean, per_turn=False)
    assert [c.advantages for c in made] == [(2.0,), (-2.0,)]
    assert [c.turn_rewards for c in made] == [(2.0, 4.0), (0.0, 2.0)]


def test_truncation_and_length_penalty_change_the_last_turn():
    cut = rollout([1.0, 0.5], 3.0, stop=StopReason.MAX_TOKENS)
    (zeroed,) = credit([cut], cut=truncation.zero_reward)
    assert (zeroed.reward, zeroed.turn_rewards) == (0.0, (2.0, -2.0))
    penalised = RewardShaping(normalise_each=False, length_penalty=0.25)
    (shorter,) = credit([cut], shaping=penalised)  # of two tokens
    assert (shorter.reward, shorter.turn_rewards) == (5.5, (2.0, 3.5))
    (dropped, kept) = credit([cut, rollout([0.0], 1.0)], cut=truncation.drop)
    assert (dropped.reward, dropped.turn_rewards, dropped.advantages) == (None, (), (0.0,))
    assert (kept.trains, kept.advantages) == (True, (0.0,))  # the only scored rollout


def test_each_named_reward_is_compared_by_turn():
    made = credit([rollout([1.0, 0.5], 3.0), rollout([0.0, 0.5], 1.0)], shaping=EACH)
    # step, weight 2: to go 1.5, 0.5 and 0.5, 0.5; final: 3, 3 and 1, 1.
    assert [c.advantages for c in made] == [(2 * 0.5 + 1, 1.0), (-2.0, -1.0)]


def test_infinite_rewards_cost_only_their_own_rollout():
    infinite = rollout([1.0, 0.0], 0.0)
    both = {"step": (math.inf, -math.inf)}
    rewards = {"step": math.nan, "final": 0.0}
    infinite = replace(infinite, reward=None, rewards=rewards, turn_rewards=both)
    made = credit([rollout([1.0], 0.0), infinite, rollout([0.0], 0.0)], shaping=EACH)
    assert [c.advantages for c in made] == [(1.0,), (0.0,), (-1.0,)]


def test_an_advantage_must_return_a_number_for_each_turn():
    with pytest.raises(RunFailed, match="returned 1 numbers for a rollout of 2 turns"):
        credit([rollout([1.0, 0.0], 0.0)], lambda group: [[1.0]])


def test_a_sampled_turn_counts_although_the_environment_reports_fewer_turns():
    played = Rollout((row(-1, 0, 1, 2),), [], 1.0, {}, StopReason.STOP, 1, 0.0)  # says 1 turn
    (made,) = credit([played], lambda group: [[*turns] for turns in group.turn_rewards])
    assert made.turn_rewards == (0.0, 0.0, 1.0)


# Three turns, of which the third forked: rows of turns 0 (2 tokens) and 1 (1), and of turn 2 (3).
FORKED = rollout([1.0, 0.0, 0.0], 0.0, row(-1, 0, 0, -1, 1), row(-1, -1, 2, 2, 2))
SHORT = rollout([0.0], 0.0, row(-1, -1, 0))
PAIR = Group(0, EXAMPLE, 0, (FORKED, SHORT), credit([FORKED, SHORT]))


def by_token(rows, field):
    return [getattr(r, field).tolist() for r in rows]


def test_each_token_gets_the_number_of_its_turn_in_every_row():
    made = credit([FORKED, SHORT], lambda _: [[5.0, 6.0, 7.0], [8.0]])
    rows = weighted_rows([Group(0, EXAMPLE, 0, (FORKED, SHORT), made)], token_mean)
    assert by_token(rows, "advantages") == [[0, 5, 5, 0, 6], [0, 0, 7, 7, 7], [8, 8, 8]]
    assert [r.first_position for r in rows] == [0, 3, 0]
    weights = by_token(weighted_rows([PAIR], turn_mean, per_turn=True), "token_weights")
    # Four turns, of 2, 1, 3 and 1 tokens.
    expected = [[0, 1 / 8, 1 / 8, 0, 1 / 4], [0, 0, 1 / 12, 1 / 12, 1 / 12], [1 / 4] * 3]
    assert weights == [pytest.approx(values) for values in expected]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [3, 10, 99])
def test_the_columns_of_a_token_do_not_depend_on_the_split(ranks, budget):
    made = credit([FORKED, SHORT], lambda _: [[5.0, 6.0, 7.0], [8.0]])
    shares = plan_batch(
        [Group(0, EXAMPLE, 0, (FORKED, SHORT), made)],
        turn_mean,
        per_turn=True,
        step=3,
        ranks=ranks,
        tokens_per_micro_batch=budget,
        metrics={},
    )
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
    told = rollout_fields([Group(0, EXAMPLE, 0, (FORKED, SHORT), made)])
    np.testing.assert_array_equal(told["turn_rewards"], [[2, 0, 0], [0, np.nan, np.nan]])
    assert told["lengths"].tolist() == [6, 1]


def test_the_rollouts_file_and_the_metrics_have_the_rewards_by_turn():
    line = json.loads(json_line(trained_line(PAIR, FORKED, PAIR.credits[0], True)))
    assert line["rewards"] == {"step": 1.0, "final": 0.0}
    assert line["turn_rewards"] == {"step": [1.0, 0.0, 0.0]}
    assert line["advantage"] == [1.0, 0.0, 0.0]
    metrics = batch_metrics([PAIR], 0)
    assert metrics["reward/step"] == 0.5
    turns = {name: v for name, v in metrics.items() if "turn_" in name}
    assert turns == {"reward/step/turn_0": 0.5, "reward/step/turn_1": 0, "reward/step/turn_2": 0}
