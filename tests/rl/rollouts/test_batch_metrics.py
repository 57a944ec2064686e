"""Numbers of a batch, against ones worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from envs.episode import Example, StopReason
from rl.evaluation.summary import PlayedExample, summarise
from rl.records import Credit, Group, Rollout, TrainingRow
from rl.rollouts.batch_metrics import batch_metrics


def row(versions: list[int]) -> TrainingRow:
    values = np.array([-1, *versions], np.int32)
    logprobs = np.zeros(len(values), np.float32)
    return TrainingRow(values, values >= 0, logprobs, values, values.clip(max=0))


def rollout(reward, versions=((3,),), stop=StopReason.STOP, turns=1, seconds=0.0, **rewards):
    rows = tuple(row(list(v)) for v in versions)
    return Rollout(rows, [], reward, rewards, stop, turns, seconds)


def group(*rollouts: Rollout) -> Group:
    credits = tuple(  # half of every reward is lost to some penalty; what was cut off is masked
        Credit(r.reward and r.reward / 2, (0.0,), not r.stop_reason.truncated) for r in rollouts
    )
    return Group(0, Example(0, "e", []), 3, rollouts, credits)


BATCH = [
    group(
        rollout(1.0, [[3, 3, 4]], turns=1, seconds=2.0, exact=1.0),
        rollout(0.0, [[2], [3, 4]], stop=StopReason.MAX_TOKENS, turns=3, seconds=4.0, exact=0.0),
    ),
    group(rollout(None, [], stop=StopReason.ENV_ERROR), rollout(0.5, [[4]], exact=0.5)),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train/reward", 0.5),  # the unscorable rollout stays out
        ("train/shaped_reward", 0.25),
        ("rollout/untrained", 1 / 4),
        ("reward/exact", 0.5),
        ("train/tokens", 7),
        ("rollout/mean_length", 7 / 4),
        ("rollout/max_length", 3),
        ("rollout/turns", 6 / 4),
        ("rollout/generation_time", 6 / 4),
        ("rollout/truncated", 1 / 4),
        ("rollout/errors", 1 / 4),
        ("rollout/forks", 1 / 4),
        ("rollout/zero_spread", 0.0),  # of the groups in which two were scored
        ("stop/stop", 2 / 4),
        ("stop/max_tokens", 1 / 4),
        ("stop/env_error", 1 / 4),
        ("staleness/mean", (1 + 1 + 0 + 2 + 1 + 0 + 0) / 7),
        ("staleness/max", 2),
        ("staleness/share_0", 3 / 7),
        ("staleness/share_1", 3 / 7),
        ("staleness/share_2", 1 / 7),
    ],
)
def test_a_batch_in_numbers(name, value):
    assert batch_metrics(BATCH, step=4)[name] == pytest.approx(value)


def test_every_metric_is_a_plain_float():
    assert {type(value) for value in batch_metrics(BATCH, step=4).values()} == {float}


def test_a_batch_and_an_evaluation_of_the_same_rollouts_say_the_same():
    groups = [*BATCH, group(rollout(1.0), rollout(1.0))]
    batch = batch_metrics(groups, step=4)
    evaluated = summarise([PlayedExample(g.example, g.rollouts) for g in groups], 1.0).metrics()
    shared = [n for n in evaluated if n.replace("eval/", "rollout/") in batch]
    assert len(shared) >= 6
    assert evaluated["eval/reward"] == batch["train/reward"]
    for name in shared:
        assert evaluated[name] == pytest.approx(batch[name.replace("eval/", "rollout/")]), name
    assert batch["rollout/zero_spread"] == 0.5


def test_a_named_reward_is_averaged_over_finite_values_and_the_others_are_counted():
    """Only the first eight turns have a metric of their own."""
    rewards = [1.0, math.nan, 0.0, math.inf]
    played = group(*(rollout(1.0, exact=1.0, form=form) for form in rewards))
    by_turn = [{"form": (form, *[1.0] * 8)} for form in rewards]
    rollouts = tuple(
        replace(one, turn_rewards=turns)
        for one, turns in zip(played.rollouts, by_turn, strict=True)
    )
    metrics = batch_metrics([replace(played, rollouts=rollouts)], step=4)
    found = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert found == {
        "reward/exact": 1.0,
        "reward/form": 0.5,
        "reward/form/nonfinite": 2.0,
        "reward/form/turn_0": 0.5,
        "reward/form/turn_0/nonfinite": 2.0,
        **{f"reward/form/turn_{turn}": 1.0 for turn in range(1, 8)},
    }
    evaluated = summarise([PlayedExample(played.example, played.rollouts)], 1.0).metrics()
    assert evaluated["eval/reward/form"] == 0.5
    assert evaluated["eval/reward/form/nonfinite"] == 2.0


def test_self_play_has_a_spread_although_every_rollout_gets_the_same_sum():
    rollouts = [rollout(0.0, [[3, 3]], turns=2), rollout(0.0, [[3, 3]], turns=2)]
    credits = (Credit(0.0, (1.0, -1.0)), Credit(0.0, (-1.0, 1.0)))
    played = replace(group(*rollouts), credits=credits)
    assert batch_metrics([played], step=4)["rollout/zero_spread"] == 0.0
    same = replace(played, credits=(Credit(0.0, (1.0, -1.0)),) * 2)
    assert batch_metrics([played, same], step=4)["rollout/zero_spread"] == 0.5
