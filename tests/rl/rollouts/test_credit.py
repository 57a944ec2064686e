"""Credits and batches by hand: truncation, shaping, GDPO, tokens, turns, roles, whitening.

Completion lengths are in tokens; z-scores have no epsilon here.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from envs.episode import StopReason
from losses.advantages import group_mean, group_zscore, none, turn_group_mean
from losses.aggregation import constant_length, prompt_mean, sequence_mean, token_mean, turn_mean
from rl.learner.objective import Batch
from rl.records import Credit, Group, TrainingRow
from rl.rollouts import truncation
from rl.rollouts.batch_credit import apply_batch_credit, whiten
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.compared import compared_columns
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.plan import plan_batch, rollout_fields, weighted_rows
from rl.rollouts.service import train_line
from rl.runtime.failure import RunFailed
from rl.runtime.files import json_line
from tests.support.composing import chosen, learned
from tests.support.rollouts import EXAMPLE, group, group_credit, rollout, row

zscore = partial(group_zscore, epsilon=0.0)
soft = partial(truncation.penalty, limit=10, start=0.5, weight=2.0)
CUT = (StopReason.MAX_TOKENS, StopReason.CONTEXT)
ROOT3 = math.sqrt(3)


def credits(rollouts, advantage=group_mean, **options):
    return group_credit(advantage, **options)(EXAMPLE, rollouts)


def advantages(rollouts, advantage=zscore, **options):
    return [credit.advantages[0] for credit in credits(rollouts, advantage, **options)]


@pytest.mark.parametrize(
    ("lengths", "reward"),
    [
        ((5,), 0.75),  # the onset: half of the limit of 10
        ((6,), 0.75 - 2 * 0.2),
        ((4, 6, 1), 0.75 - 2 * 0.2),  # the longest of them counts
        ((30,), 0.75 - 2),
    ],
)
@pytest.mark.parametrize("stop", [StopReason.STOP, StopReason.MAX_TOKENS])
def test_the_soft_limit_depends_only_on_the_longest_turn(lengths, reward, stop):
    found = soft(rollout(0.75, lengths=lengths, stop=stop))
    assert found.reward == pytest.approx(reward, abs=1e-12)
    assert found.trains
    assert soft(rollout(None, lengths=lengths, stop=stop)) == Credit(None)
    # By default the limit is the token limit of a turn, here that of a mixture's environment.
    assert chosen("truncation", "penalty")["limit"] is None
    for own, less in ((8, 2 * 0.5), (None, 0.0)):
        played = replace(rollout(0.75, lengths=(6, 2), stop=stop), turn_limit=own)
        found = truncation.penalty(played, limit=None, start=0.5, weight=2.0)
        assert found.reward == pytest.approx(0.75 - less)


def test_masked_rollouts_stay_in_the_baseline_and_dropped_ones_do_not():
    rollouts = [rollout(1.0), rollout(0.0), rollout(-4.0, stop=CUT[1])]
    masked, dropped = (credits(rollouts, cut=cut) for cut in (truncation.mask, truncation.drop))
    assert [c.advantages for c in masked] == [(2.0,), (1.0,), (-3.0,)]
    assert [c.advantages for c in dropped] == [(0.5,), (-0.5,), (0.0,)]
    assert [c.trains for c in masked] == [c.trains for c in dropped] == [True, True, False]


PAIRS = [(0.0, 100.0), (0.0, 300.0), (3.0, 200.0)]
BY_HAND = {
    # a: -1, -1, 2 off its mean, std sqrt(3); b: -100, 100, 0, std 100. Weights 1 and 0.5.
    "a small reward counts as much as a large one": (
        {"a": 1.0, "b": 0.5},
        [rollout(a + b / 2, a=a, b=b, unweighted=9 * a) for a, b in PAIRS],
        [-1 / ROOT3 - 0.5, -1 / ROOT3 + 0.5, 2 / ROOT3],
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
}


@pytest.mark.parametrize(("weights", "rollouts", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_each_reward_is_normalised_by_itself(weights, rollouts, expected):
    found = advantages(rollouts, weights=weights, cut=truncation.drop, normalise_each=True)
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [0.001, 10.0])
def test_a_penalty_keeps_its_size_beside_normalised_rewards(size):
    # z-scores of a: -1, -1, 2 over sqrt(3). Lengths of 1, 2 and 6 tokens, 3 on average.
    rollouts = [rollout(a, lengths=(n,), a=a) for a, n in ((0.0, 1), (0.0, 2), (3.0, 6))]
    expected = [-1 / ROOT3 + 2 * size, -1 / ROOT3 + size, 2 / ROOT3 - 3 * size]
    each = {"weights": {"a": 1.0}, "normalise_each": True}
    assert advantages(rollouts, length_penalty=size, **each) == pytest.approx(expected, abs=1e-12)
    # The soft limit subtracts 0, 0 and `size` / 5: 6 tokens of 10, from 5 on.
    lost = size / 15
    expected = [-1 / ROOT3 + lost, -1 / ROOT3 + lost, 2 / ROOT3 - 2 * lost]
    limited = advantages(rollouts, cut=partial(soft, weight=size), **each)
    assert limited == pytest.approx(expected, abs=1e-12)
    # Where nothing is compared, each rollout loses its own penalty.
    alone = advantages(rollouts, none, compares=False, length_penalty=size, **each)
    assert alone == pytest.approx([-size, -2 * size, 3 - 6 * size], abs=1e-12)


def test_a_reward_that_is_not_finite_counts_as_0_if_truncation_scores_the_rollout():
    cut_off = rollout(math.nan, stop=CUT[0], a=math.nan)
    rollouts = [rollout(1.0, a=1.0), cut_off, rollout(4.0, a=4.0)]
    each = {"weights": {"a": 1.0}, "normalise_each": True}

    def scored(rollout):
        return Credit(0.0 if rollout.stop_reason in CUT else rollout.reward)

    found = advantages(rollouts, group_mean, cut=scored, **each)
    assert found == pytest.approx([1 - 5 / 3, 0 - 5 / 3, 4 - 5 / 3])


@pytest.mark.parametrize("needs_score", [True, False])
def test_a_rollout_without_a_score_trains_only_if_the_loss_reads_no_advantages(needs_score):
    rollouts = [
        rollout(1.0, lengths=(2,)),
        rollout(None, lengths=(98,), stop=StopReason.TIMEOUT),
        rollout(None, fields={"role": "user"}),  # a role without a score never trains
    ]
    made = group(rollouts, credits(rollouts, needs_score=needs_score))
    rows = weighted_rows([made], token_mean)
    assert [r.rollout_id for r in rows] == ([0] if needs_score else [0, 1])
    assert rows[0].token_weights[-1] == np.float32(1 / 2 if needs_score else 1 / 100)
    assert rollout_fields([made])["lengths"].tolist() == [2, 0 if needs_score else 98, 0]


@pytest.mark.parametrize("true", ["by_turn", "by_token", "compares"])
def test_the_credits_of_a_run_have_the_facts_of_its_advantage_and_loss(true):
    nodes = {"truncation": "keep", "reward": "default", "advantage": "group_mean"}
    reads = ["advantages"] if true == "by_turn" else []
    facts = learned(**{f"advantage_{true}": True}, loss_reads=reads)
    run = SimpleNamespace(**{key: chosen(key, name) for key, name in nodes.items()}, learned=facts)
    made = GroupCredit.of(run, lambda example: {})
    found = (made.per_turn, made.per_token, made.compares, made.needs_score)
    assert found == (true == "by_turn", true == "by_token", true == "compares", true == "by_turn")


# Completions of 2 and (3), 4 and 5, (6) tokens; those in brackets do not train.
GROUPS = [
    group(
        [rollout(1.0, lengths=(2,)), rollout(0.0, lengths=(3,))],
        [Credit(1.0, (0.5,)), Credit(0.0, (-0.5,), trains=False)],
    ),
    group(
        [rollout(2.0, lengths=(4,)), rollout(None, lengths=(5,))],
        [Credit(1.5, (7.0,)), Credit(None, (0.0,))],
        index=1,
    ),
    group([rollout(1.0, lengths=(6,))], [Credit(None, (0.0,), trains=False)], index=2),
]


def test_a_rollout_that_does_not_train_leaves_rows_and_denominators():
    for aggregation, weights in (
        (token_mean, [1 / 11, 1 / 11, 1 / 11]),
        (sequence_mean, [1 / 6, 1 / 12, 1 / 15]),
        (partial(constant_length, length=10), [1 / 30, 1 / 30, 1 / 30]),
        (prompt_mean, [1 / 4, 1 / 18, 1 / 18]),
    ):
        rows = weighted_rows(GROUPS, aggregation)
        assert [r.num_completion for r in rows] == [2, 4, 5]
        assert [r.rollout_id for r in rows] == [0, 2, 3]
        assert [set(r.advantages[r.completion_mask]) for r in rows] == [{0.5}, {7.0}, {0.0}]
        found = [set(r.token_weights[r.completion_mask]) for r in rows]
        assert found == [{np.float32(weight)} for weight in weights]
        told = rollout_fields(GROUPS)
        rewards = np.array([1, 0, 1.5, np.nan, np.nan], np.float32)  # the shaped ones
        np.testing.assert_array_equal(told["rewards"], rewards)
        assert told["group_ids"].tolist() == [0, 0, 1, 1, 2]
        assert told["lengths"].tolist() == [2, 0, 4, 5, 0]  # of what trains


PAIR = [rollout(1.0, lengths=(2, 1), exact=1.0), rollout(None, lengths=(4,))]


def test_an_advantage_sees_the_example_the_rollouts_and_all_rewards():
    seen = []
    credits(PAIR, lambda group: seen.append(group) or [0.0, 0.0], weights={"exact": 1.0})
    # By name, the reward that truncation took is 0.
    zeroed = [rollout(1.0, stop=CUT[0], exact=1.0), rollout(0.5, exact=0.5)]
    each = {"normalise_each": True, "weights": {"exact": 1.0}, "cut": truncation.zero_reward}
    credits(zeroed, lambda group: seen.append(group) or [0.0, 0.0], **each)
    whole, by_name = seen
    assert whole.example is EXAMPLE
    assert (whole.rollouts, whole.rewards, whole.lengths) == (PAIR, [1.0, None], [3, 4])
    assert whole.turn_rewards == [(0.0, 1.0), None]
    assert whole.named_rewards == [{"exact": 1.0}, {}]
    assert by_name.rewards == [0.0, 0.5]


@dataclass(frozen=True, kw_only=True)
class HalfOfTheBest(RewardShaping):
    """Subtract half of the best reward of the group."""

    def penalties(self, group):
        best = max(reward for reward in group.rewards if reward is not None)
        return [best / 2 for _ in group.rewards]


def test_penalties_see_the_group_after_truncation_and_lower_the_rewards():
    shaping = HalfOfTheBest(normalise_each=False, length_penalty=0.0)
    rollouts = [rollout(3.0), rollout(8.0, stop=CUT[0]), rollout(None)]
    options = {"shaping": shaping, "cut": truncation.zero_reward}
    made = credits(rollouts, lambda group: [np.float32(r or 0) for r in group.rewards], **options)
    assert [c.reward for c in made] == [1.5, -1.5, None]
    assert [c.advantages for c in made] == [(1.5,), (-1.5,), (0.0,)]
    assert {type(c.advantages[0]) for c in made} == {float}  # JSON would hold numpy's as texts


def by_token(group):
    return [
        [] if reward is None else np.float32([reward + i for i in range(length)])
        for reward, length in zip(group.rewards, group.lengths, strict=True)
    ]


def test_each_token_gets_its_own_number_in_every_row_of_its_rollout():
    made = credits(PAIR, by_token, per_token=True, needs_score=False)
    rows = weighted_rows([group(PAIR, made)], token_mean)
    found = [r.advantages[r.completion_mask].tolist() for r in rows]
    assert found == [[1.0, 2.0], [3.0], [0.0] * 4]  # two rows of the first rollout
    assert all(not r.advantages[~r.completion_mask].any() for r in rows)
    line = json.loads(json_line(train_line(group(PAIR, made), PAIR[0], made[0], True)))
    assert line["advantage"] == 2.0  # the mean of its tokens


def test_a_group_teaches_if_its_advantages_are_not_zero():
    for rewards, numbers, columns in (
        ((1.0, 1.0), (0.5, -0.5), [[0.5, -0.5], [0.5, -0.5]]),  # compared something else
        ((1.0, 0.0), (0.0, 0.0), [[0.0, 0.0], [0.0, 0.0]]),  # nothing to learn
        ((1.0, 0.0), (0.5, -0.5), [[1.0, 0.0]]),
        ((0.1 + 0.2, 0.3), (0.0, 0.0), [[0.1 + 0.2, 0.3]]),  # equal up to rounding
        # Advantages by token: the least and the greatest of each rollout.
        ((1.0, 0.0), ((1.0, 2.0), (0.0, 2.0)), [[1.0, 0.0], [2.0, 2.0]]),
    ):
        rollouts = [rollout(reward, lengths=(2,)) for reward in rewards]
        by_token = isinstance(numbers[0], tuple)
        made = credits(rollouts, lambda group, numbers=numbers: numbers, per_token=by_token)
        assert compared_columns(group(rollouts, made)) == columns


def test_a_wrong_number_of_advantages_ends_the_run():
    for numbers, options, said in (
        ([1.0], {}, "returned 1 numbers for a group of 2 rollouts"),
        ([[1.0], []], {"per_token": True}, "1 numbers for a rollout of 3 tokens: return one for"),
        ([[1.0], []], {"per_turn": True}, "returned 1 numbers for a rollout of 2 turns"),
    ):
        with pytest.raises(RunFailed, match=said):
            credits(PAIR, lambda group, numbers=numbers: numbers, **options)


WEIGHTS = {"step": 2.0, "final": 1.0, "won": 1.0}
to_go = partial(turn_group_mean, discount=1.0)


def turned(steps, final, *rows, stop=StopReason.STOP):
    """Return a rollout with rewards by turn, of weight 2, and one of the episode."""
    rewards = {"step": sum(steps), "final": final}
    fields = {"turns": len(steps), "turn_rewards": {"step": tuple(steps)}}
    rows = rows or (row(-1, *range(len(steps))),)
    return rollout(2 * sum(steps) + final, *rows, stop=stop, fields=fields, **rewards)


def turn_credits(rollouts, advantage=to_go, *, per_turn=True, **options):
    return group_credit(advantage, per_turn=per_turn, weights=WEIGHTS, **options)(EXAMPLE, rollouts)


def turn_group(rollouts, advantage=to_go, *, per_turn=True, index=0):
    return group(rollouts, turn_credits(rollouts, advantage, per_turn=per_turn), index)


TWO = [turned([1.0, 0.5], 3.0), turned([0.0, 0.5], 1.0)]


def test_turns_are_compared_with_the_same_turns_of_the_group():
    # To go: 6, 4 and 2, 2.
    assert [c.advantages for c in turn_credits(TWO)] == [(2.0, 1.0), (-2.0, -1.0)]
    # By name: step, weight 2, to go 1.5, 0.5 and 0.5, 0.5; final 3, 3 and 1, 1.
    named = turn_credits(TWO, normalise_each=True)
    assert [c.advantages for c in named] == [(2 * 0.5 + 1, 1.0), (-2.0, -1.0)]
    # An advantage of whole rollouts reads the sum of the turns.
    whole = turn_credits(TWO, group_mean, per_turn=False)
    assert [c.advantages for c in whole] == [(2.0,), (-2.0,)]
    assert [c.turn_rewards for c in whole] == [(2.0, 4.0), (0.0, 2.0)]


def test_truncation_and_length_penalty_change_the_last_turn():
    cut = turned([1.0, 0.5], 3.0, stop=StopReason.MAX_TOKENS)
    (zeroed,) = turn_credits([cut], cut=truncation.zero_reward)
    assert (zeroed.reward, zeroed.turn_rewards) == (0.0, (2.0, -2.0))
    (shorter,) = turn_credits([cut], length_penalty=0.25)  # of two tokens
    assert (shorter.reward, shorter.turn_rewards) == (5.5, (2.0, 3.5))
    (dropped, kept) = turn_credits([cut, turned([0.0], 1.0)], cut=truncation.drop)
    assert (dropped.reward, dropped.turn_rewards, dropped.advantages) == (None, (), (0.0,))
    assert (kept.trains, kept.advantages) == (True, (0.0,))  # the only scored rollout


def test_infinite_rewards_cost_only_their_own_rollout_and_every_sampled_turn_counts():
    infinite = replace(
        turned([1.0, 0.0], 0.0),
        reward=None,
        rewards={"step": math.nan, "final": 0.0},
        turn_rewards={"step": (math.inf, -math.inf)},
    )
    made = turn_credits([turned([1.0], 0.0), infinite, turned([0.0], 0.0)], normalise_each=True)
    assert [c.advantages for c in made] == [(1.0,), (0.0,), (-1.0,)]
    # The environment reports only one turn.
    played = rollout(1.0, row(-1, 0, 1, 2), fields={"turns": 1})
    (made,) = turn_credits([played], lambda group: [[*turns] for turns in group.turn_rewards])
    assert made.turn_rewards == (0.0, 0.0, 1.0)


# Three turns, of which the third forked: rows of turns 0 (2 tokens) and 1 (1), and of turn 2 (3).
FORKED = turned([1.0, 0.0, 0.0], 0.0, row(-1, 0, 0, -1, 1), row(-1, -1, 2, 2, 2))
SHORT = turned([0.0], 0.0, row(-1, -1, 0))
FORKED_GROUP = turn_group([FORKED, SHORT])
NUMBERED = turn_group([FORKED, SHORT], lambda _: [[5.0, 6.0, 7.0], [8.0]])


def test_each_token_gets_the_number_of_its_turn_in_every_row():
    rows = weighted_rows([NUMBERED], token_mean)
    found = [r.advantages.tolist() for r in rows]
    assert found == [[0, 5, 5, 0, 6], [0, 0, 7, 7, 7], [8, 8, 8]]
    assert [r.first_position for r in rows] == [0, 3, 0]
    line = train_line(NUMBERED, FORKED, NUMBERED.credits[0], True)
    assert (line["advantage"], line["turn_rewards"]) == ((5, 6, 7), {"step": (1.0, 0.0, 0.0)})
    rows = weighted_rows([FORKED_GROUP], turn_mean, per_turn=True)
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


def of_role(role, reward):
    won = {} if reward is None else {"won": reward}
    return rollout(reward, fields={"role": role}, **won)


A, B = partial(of_role, "a"), partial(of_role, "b")


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        # a: 1, 0 of mean 1/2; b: 0.25, 0.75 of mean 1/2
        ([A(1.0), B(0.25), A(0.0), B(0.75)], [0.5, -0.25, -0.5, 0.25]),
        # In any order, and a role that spoke in one episode only has nothing to compare.
        ([B(0.25), A(1.0), A(0.0)], [0.0, 0.5, -0.5]),
        # An unscored rollout is outside the baseline of its role.
        ([A(1.0), B(None), A(0.0), B(3.0), B(1.0)], [0.5, 0.0, -0.5, 1.0, -1.0]),
        # The environment scored no rollout of this role.
        ([A(1.0), B(None), A(0.0), B(None)], [0.5, 0.0, -0.5, 0.0]),
    ],
)
@pytest.mark.parametrize("normalise_each", [False, True])
def test_rollouts_are_compared_within_their_role(rollouts, expected, normalise_each):
    options = {"per_turn": False, "normalise_each": normalise_each}
    made = turn_credits(rollouts, group_mean, **options)
    assert [c.advantages for c in made] == [(number,) for number in expected]
    assert [c.trains for c in made] == [r.reward is not None for r in rollouts]


whole_group = partial(turn_group, advantage=group_mean, per_turn=False)


def test_a_batch_names_the_reward_of_each_role_and_compares_only_within_a_role():
    flat = whole_group([A(1.0), B(0.0), A(1.0), B(0.0)])
    assert compared_columns(flat) == [[1.0, 1.0], [0.0, 0.0]]
    bounds = dict.fromkeys(("min_reward_variance", "min_reward", "max_reward"))
    buffer = DifficultyBuffer(min_spread=0.1, **bounds)
    assert buffer.why_useless(flat) == "zero_spread"
    assert buffer.why_useless(whole_group([A(1.0), B(0.0), A(1.0), B(1.0)])) == ""  # of b alone
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


def credited(*credits: Credit) -> Group:
    return group([rollout(0.0)] * len(credits), credits)


def of(*advantages: float) -> Credit:
    return Credit(1.0, advantages)


def numbers(groups: list[Group]) -> list[list[tuple[float, ...]]]:
    whitened = apply_batch_credit(groups, whiten)
    return [[credit.advantages for credit in each.credits] for each in whitened]


UNSCORED = Credit(None, (0.0,), trains=False)
MASKED = Credit(3.0, (9.0,), trains=False)
S = math.sqrt(2.5)  # of 1, 2, 3, 4, 5: squares 4 + 1 + 0 + 1 + 4, over 4
TABLE = {
    # Neither is in mean and std. The rollout without a score keeps 0.
    "rollouts without a score, and masked": (
        [[of(1.0), of(2.0), of(3.0), UNSCORED], [of(4.0), of(5.0), MASKED]],
        [[(-2 / S,), (-1 / S,), (0.0,), (0.0,)], [(1 / S,), (2 / S,), (6 / S,)]],
    ),
    "turns and tokens count one by one, and a rollout may have none": (
        [[of(1.0, 2.0)], [of(3.0), replace(of(4.0, 5.0), by_token=True), of()]],
        [[(-2 / S, -1 / S)], [(0.0,), (1 / S, 2 / S), ()]],
    ),
    # mean 0 up to rounding: the group without spread keeps an exact 0
    "a group without spread": (
        [[of(0.1 + 0.2), of(-0.3)], [of(0.0), of(0.0)]],
        [[(1.2247449,), (-1.2247449,)], [(0.0,), (0.0,)]],
    ),
    "no spread in the batch": ([[of(0.7), of(0.7)], [of(0.7 + 1e-7)]], [[(0.0,)] * 2, [(0.0,)]]),
    "one rollout with a score": ([[of(5.0), UNSCORED]], [[(0.0,), (0.0,)]]),
    "no group": ([], []),
}


@pytest.mark.parametrize("case", TABLE)
def test_whiten_subtracts_the_mean_of_the_batch_and_divides_by_its_deviation(case: str):
    given, expected = TABLE[case]
    found = numbers([credited(*credits) for credits in given])
    assert [[len(one) for one in each] for each in found] == [[len(o) for o in e] for e in expected]
    flat = [[x for each in rows for one in each for x in one] for rows in (found, expected)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-7)
    assert [x == 0 for x in flat[0]] == [x == 0 for x in flat[1]]


def test_the_order_of_groups_and_rollouts_changes_nothing():
    random = Random(0)
    values = [random.gauss(0, 1) for _ in range(24)]
    (whole,) = numbers([credited(*map(of, values))])
    whole = {v: x for v, (x,) in zip(values, whole, strict=True)}
    for _ in range(5):
        random.shuffle(values)
        split = numbers([credited(*map(of, values[i : i + 6])) for i in range(0, 24, 6)])
        found = dict(zip(values, (x for each in split for (x,) in each), strict=True))
        assert found == pytest.approx(whole, abs=1e-14)
    assert math.fsum(whole.values()) == pytest.approx(0, abs=1e-12)
    assert math.fsum(x * x for x in whole.values()) == pytest.approx(23)


def test_a_batch_credit_of_another_shape_ends_the_run():
    groups = [credited(of(1.0), of(2.0)), credited(of(3.0))]
    two = [[replace(credit, advantages=(0.0, 0.0)) for credit in g.credits] for g in groups]
    for wrong in ([], [each.credits[:1] for each in groups], two):
        with pytest.raises(RunFailed, match=r"from \[\[1, 1\], \[1\]\] to .*: return as many"):
            apply_batch_credit(groups, lambda _, wrong=wrong: wrong)


def penalised(*rollouts) -> Group:
    """Return a group whose shaped rewards are halved and whose truncated rollouts are masked."""
    pairs = [(r.reward and r.reward / 2, not r.stop_reason.truncated) for r in rollouts]
    return group(rollouts, [Credit(reward, (0.0,), trains) for reward, trains in pairs], version=3)


def sampled(*versions: int) -> TrainingRow:
    made = row(-1, *[0] * len(versions))
    return replace(made, token_versions=np.array([-1, *versions], np.int32))


ENDED = {"turns": 1, "generation_time": 2.0}
CUT_OFF = {"turns": 3, "generation_time": 4.0}
BATCH = [
    penalised(
        rollout(1.0, sampled(3, 3, 4), fields=ENDED, exact=1.0),
        rollout(
            *(0.0, sampled(2), sampled(3, 4)),
            **{"stop": StopReason.MAX_TOKENS, "fields": CUT_OFF, "exact": 0.0},
        ),
    ),
    penalised(
        rollout(None, lengths=(), stop=StopReason.ENV_ERROR, fields={"turns": 1, "error": "lost"}),
        rollout(0.5, sampled(4), exact=0.5),
    ),
]


def test_a_batch_in_numbers():
    metrics = batch_metrics(BATCH, step=4)
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics == pytest.approx(
        {
            "train/reward": 0.5,  # the unscorable rollout stays out
            "train/shaped_reward": 0.25,
            "train/tokens": 7,
            "reward/exact": 0.5,
            "rollout/untrained": 1 / 4,
            "rollout/mean_length": 7 / 4,
            "rollout/max_length": 3,
            "rollout/turns": 6 / 4,
            "rollout/generation_time": 6 / 4,
            "rollout/zero_spread": 0.0,  # of the groups in which two were scored
            **{f"rollout/{name}": 1 / 4 for name in ("truncated", "errors", "forks")},
            "rollout/retries": 0,
            **{"stop/stop": 2 / 4, "stop/max_tokens": 1 / 4, "stop/env_error": 1 / 4},
            "staleness/mean": (1 + 1 + 0 + 2 + 1 + 0 + 0) / 7,
            "staleness/max": 2,
            **{f"staleness/share_{s}": share / 7 for s, share in enumerate((3, 3, 1))},
        }
    )
