"""The critic under DeepSpeed, compared with plain torch (critic_worker.py measures)."""

import pytest

from tests.support.critic_worker import GRADIENTS, KEPT, SUMS, WAYS
from tests.support.ranks import measurements

ways = pytest.mark.parametrize(
    ("ranks", "mode", "way"),
    [(ranks, mode, way) for ranks in (1, 2) for mode in GRADIENTS[ranks] for way in WAYS],
)
kept = pytest.mark.parametrize(
    ("ranks", "dtype", "mode", "adapter"),
    [(ranks, *case) for ranks in (1, 2) for case in KEPT[ranks]],
)


def measured(ranks):
    return measurements(ranks, "tests.support.critic_worker")


@ways
def test_advantages_are_those_of_whole_rollouts_wherever_their_rows_lie(ranks, mode, way):
    assert measured(ranks)[f"gradient {mode}"][way]["advantages"] < 1e-5


@ways
def test_a_step_is_that_of_plain_torch_on_the_whole_batch(ranks, mode, way):
    found = measured(ranks)[f"gradient {mode}"][way]
    assert found["error"] < 1e-5
    for name in ("losses", "norms"):
        expected, reported = found[name]
        assert expected > 0.01
        assert reported == pytest.approx(expected, rel=1e-5)
    if way == "clipped":
        assert 0.1 < found["clipped"] < 0.9


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_the_first_step_every_value_is_zero(ranks):
    assert {measured(ranks)[f"gradient {mode}"]["first values"] for mode in GRADIENTS[ranks]} == {0}


@kept
def test_a_loaded_critic_goes_on_as_if_nothing_had_happened(ranks, dtype, mode, adapter):
    found = measured(ranks)[f"{dtype} {mode}"]
    assert (found["loaded"], found["next"], found["values"]) == (True, True, True)
    assert "deepspeed" in found["files"]


@kept
def test_beside_an_adapter_the_critic_trains_an_adapter_and_its_head(ranks, dtype, mode, adapter):
    found = measured(ranks)[f"{dtype} {mode}"]
    assert found["trained"] == ["body", "head"]
    assert found["adapter alone"] == adapter


@kept
def test_a_return_that_is_not_finite_changes_nothing(ranks, dtype, mode, adapter):
    found = measured(ranks)[f"{dtype} {mode}"]
    assert (found["skipped"], found["unchanged"]) == (1, True)


@kept
def test_a_batch_without_a_state_is_no_step(ranks, dtype, mode, adapter):
    found = measured(ranks)[f"{dtype} {mode}"]
    assert found["nothing"] == {"untrained": {}, "empty": {}}
    assert found["still unchanged"]


@pytest.mark.parametrize(
    ("ranks", "mode"), [(ranks, mode) for ranks in (1, 2) for mode in SUMS[ranks]]
)
def test_gradients_of_many_bfloat16_micro_batches_lose_nothing_in_their_sum(ranks, mode):
    found = measured(ranks)[f"sums {mode}"]
    assert found["micro_batches"] > 30
    assert found["error"] < 1e-5


def test_a_head_start_holds_the_policy_still_while_the_critic_learns():
    found = measured(1)["learner"]
    assert found["stood"]
    assert found["moved"]
    empty, value_loss = found["alone"]
    assert empty == 1
    assert value_loss > 0


def test_a_resumed_run_with_a_critic_takes_the_same_step():
    assert measured(1)["learner"]["different"] == []


OWN = {
    *("value_loss", "value_mean", "return_mean", "explained_variance"),
    *("critic_grad_norm", "critic_skipped", "critic_learning_rate"),
}


def test_without_a_critic_none_is_loaded_and_no_metric_is_its_own():
    found = measured(1)["learner"]
    assert found["bare"]
    own = {f"train/{name}" for name in OWN}
    assert own <= set(found["metrics"])
    reference = {"train/kl_beta", "train/kl_divergence", "train/kl_penalty", "train/correction"}
    assert set(found["metrics"]) - set(found["none"]) - reference == own
