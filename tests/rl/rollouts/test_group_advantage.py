"""What an advantage and reward shaping see of their group, and advantages of single tokens."""

import json
from dataclasses import dataclass, replace

import pytest

from losses.aggregation import token_mean
from rl.records import Group
from rl.rollouts.compared import compared_columns
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.plan import weighted_rows
from rl.rollouts.service import trained_line
from rl.rollouts.truncation import keep, zero_reward
from rl.runtime.failure import RunFailed
from rl.runtime.files import json_line
from tests.rl.rollouts.test_credit import CUT, EXAMPLE, rollout

SHAPING = RewardShaping(normalise_each=False, length_penalty=0.0)
PAIR = [rollout(1.0, lengths=(2, 1), exact=1.0), rollout(None, lengths=(4,))]


def credits(advantage, rollouts=PAIR, shaping=SHAPING, cut=keep, **others):
    return GroupCredit(cut, shaping, advantage, lambda _: {"exact": 1.0}, **others)(
        EXAMPLE, rollouts
    )


def test_an_advantage_sees_the_example_the_rollouts_and_all_rewards():
    seen = []
    credits(lambda group: seen.append(group) or [0.0, 0.0])
    (group,) = seen
    assert group.example is EXAMPLE
    assert group.rollouts == PAIR
    assert group.rewards == [1.0, None]
    assert group.turn_rewards == [(0.0, 1.0), None]
    assert group.named_rewards == [{"exact": 1.0}, {}]
    assert group.lengths == [3, 4]


@dataclass(frozen=True, kw_only=True)
class HalfOfTheBest(RewardShaping):
    """Subtract half of the best reward of the group."""

    def penalties(self, group):
        best = max(reward for reward in group.rewards if reward is not None)
        return [best / 2 for _ in group.rewards]


def test_penalties_see_the_group_after_truncation_and_lower_the_rewards():
    shaping = HalfOfTheBest(normalise_each=False, length_penalty=0.0)
    rollouts = [rollout(3.0), rollout(8.0, CUT[0]), rollout(None)]
    made = credits(lambda group: [r or 0.0 for r in group.rewards], rollouts, shaping, zero_reward)
    assert [c.reward for c in made] == [1.5, -1.5, None]
    assert [c.advantages for c in made] == [(1.5,), (-1.5,), (0.0,)]


@pytest.mark.parametrize(
    ("advantage", "others", "said"),
    [
        (lambda group: [1.0], {}, "returned 1 numbers for a group of 2 rollouts"),
        (
            lambda group: [[1.0], []],
            {"per_token": True},
            "returned 1 numbers for a rollout of 3 tokens: return one for each token of each",
        ),
    ],
)
def test_a_wrong_number_of_advantages_ends_the_run(advantage, others, said):
    with pytest.raises(RunFailed, match=said):
        credits(advantage, **others)


def by_token(group):
    return [
        [] if reward is None else [reward + i for i in range(length)]
        for reward, length in zip(group.rewards, group.lengths, strict=True)
    ]


def test_each_token_gets_its_own_number_in_every_row_of_its_rollout():
    made = credits(by_token, per_token=True, needs_score=False)
    group = Group(0, EXAMPLE, 0, tuple(PAIR), made)
    rows = weighted_rows([group], token_mean)
    found = [r.advantages[r.completion_mask].tolist() for r in rows]
    assert found == [[1.0, 2.0], [3.0], [0.0] * 4]  # two rows of the first rollout
    assert all(not r.advantages[~r.completion_mask].any() for r in rows)
    line = json.loads(json_line(trained_line(group, PAIR[0], made[0], True)))
    assert line["advantage"] == 2.0  # the mean of its tokens


def test_a_single_token_and_a_rollout_without_tokens_have_advantages_by_token_too():
    rollouts = [rollout(1.0, lengths=(1,)), rollout(0.5, lengths=())]
    made = credits(by_token, rollouts, per_token=True)
    assert [c.advantages for c in made] == [(1.0,), ()]
    (row,) = weighted_rows([Group(0, EXAMPLE, 0, tuple(rollouts), made)], token_mean)
    assert row.advantages[row.completion_mask].tolist() == [1.0]
    assert trained_line(Group(0, EXAMPLE, 0, tuple(rollouts), made), rollouts[1], made[1], True)


def test_a_group_with_advantages_by_token_compares_these_and_not_the_rewards():
    rollouts = [rollout(1.0, lengths=(2,)), rollout(0.0, lengths=(3,))]
    made = credits(by_token, rollouts, per_token=True)  # 1, 2 and 0, 1, 2
    columns = compared_columns(Group(0, EXAMPLE, 0, tuple(rollouts), made))
    assert columns == [[1.0, 0.0], [2.0, 2.0]]  # the least and the greatest of each rollout


@pytest.mark.parametrize(
    ("rewards", "numbers", "columns"),
    [
        ((1.0, 1.0), (0.5, -0.5), [[0.5, -0.5], [0.5, -0.5]]),  # compared something else
        ((1.0, 0.0), (0.0, 0.0), [[0.0, 0.0], [0.0, 0.0]]),  # nothing to learn
        ((1.0, 0.0), (0.5, -0.5), [[1.0, 0.0]]),
        ((1.0, 1.0), (0.0, 0.0), [[1.0, 1.0]]),
        ((0.1 + 0.2, 0.3), (0.0, 0.0), [[0.1 + 0.2, 0.3]]),  # equal up to rounding
    ],
)
def test_a_group_teaches_if_its_advantages_are_not_zero(rewards, numbers, columns):
    rollouts = tuple(rollout(reward) for reward in rewards)
    made = credits(lambda group: numbers, rollouts)
    assert compared_columns(Group(0, EXAMPLE, 0, rollouts, made)) == columns


def test_a_group_seen_by_name_has_zeros_where_truncation_took_the_reward():
    seen = []
    shaping = replace(SHAPING, normalise_each=True)
    rollouts = [rollout(1.0, CUT[0], exact=1.0), rollout(0.5, exact=0.5)]
    credits(lambda group: seen.append(group.rewards) or [0.0, 0.0], rollouts, shaping, zero_reward)
    assert seen == [[0.0, 0.5]]
