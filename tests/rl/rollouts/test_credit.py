"""Credits of rollouts worked by hand: truncation, shaping, GDPO.

Completion lengths are in tokens; z-scores have no epsilon here.
"""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from envs.episode import Example, StopReason
from losses.advantages import group_mean, group_zscore, none
from losses.aggregation import constant_length, prompt_mean, sequence_mean, token_mean
from rl.inference.client import RequestTally
from rl.records import Credit, Group, Rollout, TrainingRow
from rl.rollouts import truncation
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.compared import compared_columns
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.plan import rollout_fields, weighted_rows
from rl.rollouts.service import RolloutService
from rl.runtime.folder import RunFolder
from tests.support.composing import chosen, learned

zscore = partial(group_zscore, epsilon=0.0)
soft = partial(truncation.penalty, limit=10, start=0.5, weight=2.0)
SUMMED = RewardShaping(normalise_each=False, length_penalty=0.0)
EACH = RewardShaping(normalise_each=True, length_penalty=0.0)
CUT = (StopReason.MAX_TOKENS, StopReason.CONTEXT)
ROOT3 = math.sqrt(3)


EXAMPLE = Example(0, "e", [])


def weights_of(weights):
    return lambda example: weights


def row(length: int, prompt: int = 1, turn: int = 0) -> TrainingRow:
    versions = np.array([-1] * prompt + [0] * length, np.int32)
    logprobs = np.zeros(len(versions), np.float32)
    turns = np.where(versions >= 0, turn, -1).astype(np.int32)
    return TrainingRow(versions + 2, versions >= 0, logprobs, versions, turns)


def rollout(reward, stop=StopReason.STOP, lengths=(1,), **rewards: float) -> Rollout:
    rows = tuple(row(n, turn=turn) for turn, n in enumerate(lengths))
    return Rollout(rows, [], reward, rewards, stop, len(rows), 0.0)


def group(index: int, rollouts, credits) -> Group:
    return Group(index, Example(index, "e", []), 0, tuple(rollouts), tuple(credits))


@pytest.mark.parametrize("stop", StopReason)
@pytest.mark.parametrize("reward", [0.75, None])
@pytest.mark.parametrize(
    ("mode", "cut_off"),
    [
        ("keep", lambda reward: Credit(reward, trains=True)),
        ("mask", lambda reward: Credit(reward, trains=False)),
        ("zero_reward", lambda reward: Credit(None if reward is None else 0.0, trains=True)),
        ("mask_zero", lambda reward: Credit(None if reward is None else 0.0, trains=False)),
        ("drop", lambda reward: Credit(None, trains=False)),
    ],
)
def test_truncation_changes_only_rollouts_that_a_token_limit_cut_off(mode, cut_off, reward, stop):
    expected = cut_off(reward) if stop in CUT else Credit(reward, trains=True)
    assert getattr(truncation, mode)(rollout(reward, stop)) == expected


@pytest.mark.parametrize("stop", StopReason)
@pytest.mark.parametrize(
    ("lengths", "reward"),
    [
        ((1,), 0.75),
        ((5,), 0.75),  # the onset: half of the limit of 10
        ((6,), 0.75 - 2 * 0.2),
        ((4, 4, 4), 0.75),  # each turn has the limit for itself
        ((4, 6, 1), 0.75 - 2 * 0.2),  # the longest of them counts
        ((10,), 0.75 - 2),
        ((30,), 0.75 - 2),
    ],
)
def test_the_soft_limit_depends_only_on_the_longest_turn(lengths, reward, stop):
    found = soft(rollout(0.75, stop, lengths))
    assert found.reward == pytest.approx(reward, abs=1e-12)
    assert found.trains
    assert soft(rollout(None, stop, lengths)) == Credit(None)


@pytest.mark.parametrize(
    ("own", "reward"), [(12, 0.75), (8, 0.75 - 2 * 0.5), (6, 0.75 - 2), (None, 0.75)]
)
def test_the_limit_of_the_penalty_is_the_token_limit_of_a_turn_by_default(own, reward):
    assert chosen("truncation", "penalty")["limit"] is None
    played = replace(rollout(0.75, lengths=(6, 2)), turn_limit=own)  # of a mixture's environment
    found = truncation.penalty(played, limit=None, start=0.5, weight=2.0)
    assert found.reward == pytest.approx(reward)
    assert soft(played).reward == pytest.approx(0.75 - 2 * 0.2)


def test_the_length_penalty_applies_after_truncation():
    shaping = RewardShaping(normalise_each=False, length_penalty=0.1)
    made = GroupCredit(truncation.zero_reward, shaping, group_mean, weights_of({}))(
        EXAMPLE,
        [
            rollout(1.0, lengths=(2, 3)),
            rollout(1.0, StopReason.MAX_TOKENS, lengths=(4,)),
            rollout(None, StopReason.ENV_ERROR, lengths=(7,)),
        ],
    )
    assert [credit.reward for credit in made] == [0.5, pytest.approx(-0.4), None]
    assert [credit.advantages for credit in made] == [
        (pytest.approx(0.45),),
        (pytest.approx(-0.45),),
        (0.0,),
    ]
    assert [credit.trains for credit in made] == [True, True, False]


def test_masked_rollouts_stay_in_the_baseline_and_dropped_ones_do_not():
    rollouts = [rollout(1.0), rollout(0.0), rollout(-4.0, StopReason.CONTEXT)]
    masked = GroupCredit(truncation.mask, SUMMED, group_mean, weights_of({}))(EXAMPLE, rollouts)
    dropped = GroupCredit(truncation.drop, SUMMED, group_mean, weights_of({}))(EXAMPLE, rollouts)
    assert masked == (
        Credit(1.0, (2.0,), turn_rewards=(1.0,)),
        Credit(0.0, (1.0,), turn_rewards=(0.0,)),
        Credit(-4.0, (-3.0,), trains=False, turn_rewards=(-4.0,)),
    )
    assert dropped == (
        Credit(1.0, (0.5,), turn_rewards=(1.0,)),
        Credit(0.0, (-0.5,), turn_rewards=(0.0,)),
        Credit(None, (0.0,), trains=False),
    )


def advantages(shaping, weights, *rollouts, truncated=truncation.keep, advantage=zscore):
    made = GroupCredit(truncated, shaping, advantage, weights_of(weights))(EXAMPLE, rollouts)
    return [credit.advantages[0] for credit in made]


PAIRS = [(0.0, 100.0), (0.0, 300.0), (3.0, 200.0)]
BY_HAND = {
    # a: -1, -1, 2 off its mean, std sqrt(3); b: -100, 100, 0, std 100. Weights 1 and 0.5.
    "a small reward counts as much as a large one": (
        {"a": 1.0, "b": 0.5},
        [rollout(a + b / 2, a=a, b=b, unweighted=9 * a) for a, b in PAIRS],
        [-1 / ROOT3 - 0.5, -1 / ROOT3 + 0.5, 2 / ROOT3],
    ),
    "a reward without spread has no effect": (
        {"a": 1.0, "b": 1.0},
        [rollout(5.0 + a, a=a, b=5.0) for a in (0.0, 0.0, 3.0)],
        [-1 / ROOT3, -1 / ROOT3, 2 / ROOT3],
    ),
    "a reward of weight 0 may be NaN": (
        {"a": 1.0, "b": 0.0},
        [rollout(a, a=a, b=math.nan) for a in (0.0, 0.0, 3.0)],
        [-1 / ROOT3, -1 / ROOT3, 2 / ROOT3],
    ),
    # a of the other two is 1 off its mean, b 10: each one standard deviation times 1 / sqrt(2).
    "an unscorable rollout counts in no reward": (
        {"a": 3.0, "b": 1.0},
        [rollout(10.0, a=0.0, b=10.0), rollout(None), rollout(-8.0, a=2.0, b=-10.0)],
        [-math.sqrt(2), 0.0, math.sqrt(2)],
    ),
    "a dropped rollout counts in no reward": (
        {"a": 1.0},
        [rollout(0.0, a=0.0), rollout(2.0, a=2.0), rollout(9.0, StopReason.CONTEXT, a=9.0)],
        [-1 / math.sqrt(2), 1 / math.sqrt(2), 0.0],
    ),
}


@pytest.mark.parametrize(("weights", "rollouts", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_each_reward_is_normalised_by_itself(weights, rollouts, expected):
    found = advantages(EACH, weights, *rollouts, truncated=truncation.drop)
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_summed_reward_is_not_normalised_by_parts():
    rollouts = [rollout(a + b / 2, a=a, b=b) for a, b in PAIRS]
    summed = advantages(SUMMED, {"a": 1.0, "b": 0.5}, *rollouts, advantage=group_mean)
    assert summed == pytest.approx([50 - 101, 150 - 101, 103 - 101], abs=1e-12)


def test_a_reward_that_truncation_zeroes_is_zero_in_each_named_reward():
    # a: 0, 3, 0 and not 0, 3, 9; b: 0, 0, 0 and not 0, 0, 1.
    played = [(0.0, 0.0, StopReason.STOP), (3.0, 0.0, StopReason.STOP), (9.0, 1.0, CUT[1])]
    rollouts = [rollout(2 * a + b, stop, a=a, b=b) for a, b, stop in played]
    weights = {"a": 2.0, "b": 1.0}
    found = advantages(EACH, weights, *rollouts, truncated=truncation.zero_reward)
    assert found == pytest.approx([-2 / ROOT3, 4 / ROOT3, -2 / ROOT3], abs=1e-12)


@pytest.mark.parametrize("size", [0.001, 0.1, 10.0])
def test_a_penalty_keeps_its_size_beside_normalised_rewards(size):
    # z-scores of a: -1, -1, 2 over sqrt(3). Lengths of 1, 2 and 6 tokens, 3 on average.
    rollouts = [rollout(a, lengths=(n,), a=a) for a, n in ((0.0, 1), (0.0, 2), (3.0, 6))]
    expected = [-1 / ROOT3 + 2 * size, -1 / ROOT3 + size, 2 / ROOT3 - 3 * size]
    shaping = RewardShaping(normalise_each=True, length_penalty=size)
    assert advantages(shaping, {"a": 1.0}, *rollouts) == pytest.approx(expected, abs=1e-12)
    # The soft limit subtracts 0, 0 and `size` / 5: 6 tokens of 10, from 5 on.
    limit = partial(soft, weight=size)
    found = advantages(EACH, {"a": 1.0}, *rollouts, truncated=limit)
    lost = size / 15
    expected = [-1 / ROOT3 + lost, -1 / ROOT3 + lost, 2 / ROOT3 - 2 * lost]
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_reward_that_is_not_finite_counts_as_0_if_truncation_scores_the_rollout():
    rollouts = [rollout(1.0, a=1.0), rollout(math.nan, CUT[0], a=math.nan), rollout(4.0, a=4.0)]
    found = advantages(
        *(EACH, {"a": 1.0}, *rollouts),
        truncated=lambda r: Credit(0.0 if r.stop_reason in CUT else r.reward),
        advantage=group_mean,
    )
    assert found == pytest.approx([1 - 5 / 3, 0 - 5 / 3, 4 - 5 / 3])


def test_a_penalty_is_not_compared_if_the_advantage_compares_nothing():
    shaping = RewardShaping(normalise_each=True, length_penalty=0.5)
    rollouts = [rollout(a, lengths=(n,), a=a) for a, n in ((1.0, 1), (3.0, 2))]
    made = GroupCredit(truncation.keep, shaping, none, weights_of({"a": 2.0}), compares=False)
    assert [c.advantages for c in made(EXAMPLE, rollouts)] == [(1.5,), (5.0,)]


@pytest.mark.parametrize(
    ("shaping", "compares", "rollouts", "columns"),
    [
        # The sums are equal, and each named reward differs: both rollouts have an advantage.
        (
            EACH,
            True,
            [rollout(2.0, a=2.0, b=0.0), rollout(2.0, a=1.0, b=1.0)],
            [[4, 2], [0, 1], [0, 0]],
        ),
        (SUMMED, True, [rollout(1.0, a=1.0), rollout(1.0, a=0.5), rollout(None)], [[1, 1]]),
        (SUMMED, False, [rollout(1.0), rollout(1.0)], None),
        (SUMMED, True, [rollout(None)], [[]]),
    ],
)
def test_a_group_has_the_numbers_that_its_advantage_compared(shaping, compares, rollouts, columns):
    weights = weights_of({"a": 2.0, "b": 1.0})
    made = GroupCredit(truncation.keep, shaping, group_mean, weights, compares=compares)
    played = group(0, rollouts, made(EXAMPLE, rollouts))
    assert compared_columns(played) == columns
    buffer = DifficultyBuffer(
        min_spread=1e-6, min_reward_variance=None, min_reward=None, max_reward=None
    )
    flat = columns is not None and all(len(set(column)) < 2 for column in columns)
    unscored = all(rollout.reward is None for rollout in rollouts)
    assert buffer.why_useless(played) == (
        "unscorable" if unscored else "zero_spread" if flat else ""
    )
    share = batch_metrics([played], 0)["rollout/zero_spread"]
    assert math.isnan(share) if unscored or columns is None else share == flat


def test_groups_whose_penalties_differ_have_a_spread():
    shaping = RewardShaping(normalise_each=True, length_penalty=0.5)
    rollouts = [rollout(1.0, lengths=(n,), a=1.0) for n in (1, 3)]
    made = GroupCredit(truncation.keep, shaping, zscore, weights_of({"a": 1.0}))(EXAMPLE, rollouts)
    assert compared_columns(group(0, rollouts, made)) == [[1, 1], [-0.5, -1.5]]
    assert [c.advantages for c in made] == [(0.5,), (-0.5,)]


def test_a_role_without_a_score_never_trains():
    rollouts = [replace(rollout(None), role="user"), rollout(None)]
    make = GroupCredit(truncation.keep, SUMMED, group_mean, weights_of({}), needs_score=False)
    assert [credit.trains for credit in make(EXAMPLE, rollouts)] == [False, True]


@pytest.mark.parametrize("needs_score", [True, False])
def test_a_rollout_without_a_score_trains_only_if_the_loss_reads_no_advantages(needs_score):
    rollouts = [rollout(1.0, lengths=(2,)), rollout(None, StopReason.TIMEOUT, lengths=(98,))]
    weights = weights_of({})
    credit = GroupCredit(truncation.keep, SUMMED, group_mean, weights, needs_score=needs_score)
    made = group(0, rollouts, credit(EXAMPLE, rollouts))
    rows = weighted_rows([made], token_mean)
    assert [r.rollout_id for r in rows] == ([0] if needs_score else [0, 1])
    assert rows[0].token_weights[-1] == np.float32(1 / 2 if needs_score else 1 / 100)
    assert rollout_fields([made])["lengths"].tolist() == [2, 0 if needs_score else 98]


@pytest.mark.parametrize(
    ("reads", "trains"), [(["advantages", "logprobs"], False), (["logprobs", "ref_logprobs"], True)]
)
def test_the_loss_of_a_run_decides_whether_rollouts_without_a_score_train(reads, trains):
    run = SimpleNamespace(
        truncation=chosen("truncation", "keep"),
        reward=chosen("reward", "default"),
        advantage=chosen("advantage", "group_mean"),
        learned=learned(loss_reads=reads, advantage_compares=True),
    )
    (credit,) = GroupCredit.of(run, weights_of({}))(EXAMPLE, [rollout(None)])
    assert (credit.trains, credit.advantages) == (trains, (0.0,))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (False, False, False)),
        ({"advantage_by_turn": True}, (True, False, False)),
        ({"advantage_by_token": True}, (False, True, False)),
        ({"advantage_compares": True}, (False, False, True)),
    ],
)
def test_the_credits_of_a_run_have_the_facts_of_its_advantage(facts, expected):
    nodes = {"truncation": "keep", "reward": "default", "advantage": "group_mean"}
    run = SimpleNamespace(**{k: chosen(k, v) for k, v in nodes.items()}, learned=learned(**facts))
    made = GroupCredit.of(run, weights_of({}))
    assert (made.per_turn, made.per_token, made.compares) == expected


# Completions of 2 and (3), 4 and 5, (6) tokens; those in brackets do not train.
GROUPS = [
    group(
        0,
        [rollout(1.0, lengths=(2,)), rollout(0.0, lengths=(3,))],
        [Credit(1.0, (0.5,)), Credit(0.0, (-0.5,), trains=False)],
    ),
    group(
        1,
        [rollout(2.0, lengths=(4,)), rollout(None, lengths=(5,))],
        [Credit(1.5, (7.0,)), Credit(None, (0.0,))],
    ),
    group(2, [rollout(1.0, lengths=(6,))], [Credit(None, (0.0,), trains=False)]),
]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        (token_mean, [1 / 11, 1 / 11, 1 / 11]),
        (sequence_mean, [1 / 6, 1 / 12, 1 / 15]),
        (partial(constant_length, length=10), [1 / 30, 1 / 30, 1 / 30]),
        (prompt_mean, [1 / 4, 1 / 18, 1 / 18]),
    ],
    ids=["token_mean", "sequence_mean", "constant_length", "prompt_mean"],
)
def test_a_rollout_that_does_not_train_leaves_rows_and_denominators(aggregation, weights):
    rows = weighted_rows(GROUPS, aggregation)
    assert [r.num_completion for r in rows] == [2, 4, 5]
    assert [r.rollout_id for r in rows] == [0, 2, 3]
    assert [set(r.advantages[r.completion_mask]) for r in rows] == [{0.5}, {7.0}, {0.0}]
    found = [set(r.token_weights[r.completion_mask]) for r in rows]
    assert found == [{np.float32(weight)} for weight in weights]


def test_the_trainer_gets_the_shaped_rewards_and_their_groups():
    told = rollout_fields(GROUPS)
    np.testing.assert_array_equal(
        told["rewards"], np.array([1, 0, 1.5, np.nan, np.nan], np.float32)
    )
    assert told["group_ids"].tolist() == [0, 0, 1, 1, 2]
    assert told["lengths"].tolist() == [2, 0, 4, 5, 0]  # of what trains


async def test_the_rollouts_file_has_the_shaped_reward_and_whether_it_trained(tmp_path):
    run = SimpleNamespace(
        aggregation=chosen("aggregation", "token_mean"),
        record=chosen("record", "none"),
        batch_credit=chosen("batch_credit", "none"),
        learned=learned(),
    )
    dispatcher = SimpleNamespace(on_rejected=None)
    service = RolloutService(run, RunFolder(tmp_path), dispatcher, None, RequestTally())
    dispatcher.on_rejected(GROUPS[0])
    service._write_rollouts(3, GROUPS[:2])
    service._write_rollouts(4, [])
    assert RunFolder(tmp_path).rollouts_of(4).read_text() == ""  # each rejected group once
    lines = RunFolder(tmp_path).rollouts_of(3).read_text().splitlines()
    assert {tuple(json.loads(line)["versions"]) for line in lines} == {(0,)}
    keys = ("group", "reward", "shaped_reward", "advantage", "tokens", "used")
    assert [tuple(json.loads(line)[key] for key in keys) for line in lines] == [
        (0, 1.0, 1.0, 0.5, 2, True),
        (0, 0.0, 0.0, -0.5, 3, False),  # masked
        (1, 2.0, 1.5, 7.0, 4, True),
        (1, None, None, 0.0, 5, True),
        (0, 1.0, 1.0, 0.5, 2, False),  # rejected
        (0, 0.0, 0.0, -0.5, 3, False),
    ]
