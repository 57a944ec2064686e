"""What DeepSpeed makes of our batches, compared with plain torch (policy_worker.py measures)."""

import pytest
import torch

from tests.support.policy_setup import BUDGETS, RATE
from tests.support.policy_worker import GRADIENTS, STEPS
from tests.support.ranks import measurements
from tests.support.record_cases import LOSSES
from tests.support.split_cases import ALONE_MODES, SPLIT_MODES
from tests.support.update_cases import UPDATE_MODES

torch.set_num_threads(1)

gradients = pytest.mark.parametrize(
    ("ranks", "mode"), [(ranks, mode) for ranks in (1, 2) for mode in GRADIENTS[ranks]]
)
steps = pytest.mark.parametrize(
    ("ranks", "dtype", "mode"), [(ranks, *case) for ranks in (1, 2) for case in STEPS[ranks]]
)
halves = pytest.mark.parametrize(
    ("ranks", "mode"),
    [(ranks, mode) for ranks in (1, 2) for dtype, mode in STEPS[ranks] if dtype == "bfloat16"],
)


def measured(ranks, dtype, mode):
    return measurements(ranks)[f"{dtype} {mode}"]


@gradients
def test_the_update_is_the_gradient_of_the_whole_batch_however_it_is_split(ranks, mode):
    found = measurements(ranks)[f"gradient {mode}"]
    assert [found[split]["micro_batches"] for split in BUDGETS] == [
        1,
        *([3, 12], [2, 6])[ranks - 1],
    ]
    for split in ("lone", *BUDGETS, "idle"):
        result = found[split]
        assert result["norm"] > 0.01
        assert result["error"] < 1e-5
        assert result["grad_norm"] == pytest.approx(result["norm"], rel=1e-5)
        assert result["loss"] == pytest.approx(result["value"], rel=1e-4)
        assert result["steps"] == 1


@pytest.mark.parametrize(
    ("ranks", "mode"), [(ranks, mode) for ranks in (1, 2) for mode in SPLIT_MODES[ranks]]
)
def test_gradients_of_many_bfloat16_micro_batches_lose_nothing_in_their_sum(ranks, mode):
    found = measurements(ranks)[f"sums {mode}"]
    assert found["micro_batches"] == 64
    assert found["error"] < 1e-5  # added up in bfloat16: about 1e-2


@pytest.mark.parametrize(
    ("ranks", "mode"), [(ranks, mode) for ranks in (1, 2) for mode in ALONE_MODES[ranks]]
)
def test_one_bfloat16_micro_batch_and_256_have_the_same_gradient(ranks, mode):
    """What is left, 3.5e-4, is activations and the norms' gradients (docs/experiments.md)."""
    found = measurements(ranks)[f"alone {mode}"]
    assert found["micro_batches"] == [ranks, 256]
    assert found["error"] < 1e-3  # with gradients of weights in bfloat16: 3e-3


@gradients
def test_rows_without_gradient_are_not_run_backwards(ranks, mode):
    found = measurements(ranks)[f"gradient {mode}"]
    assert {found[split]["zero_gradient_fraction"] for split in ("lone", *BUDGETS)} == {0}
    assert found["idle"]["zero_gradient_fraction"] == pytest.approx(found["idle"]["expected_idle"])
    assert 0.3 < found["idle"]["expected_idle"] < 0.7


@gradients
def test_a_batch_without_any_gradient_is_a_step_that_changes_nothing(ranks, mode):
    assert measurements(ranks)[f"gradient {mode}"]["still"] == {"unmoved": True, "grad_norm": 0}


@gradients
def test_a_long_gradient_is_clipped_and_its_length_reported(ranks, mode):
    found = measurements(ranks)[f"gradient {mode}"]["clipped"]
    assert found["grad_norm"] > 5
    assert found["update"] == pytest.approx(0.5, rel=1e-5)


@steps
def test_weights_have_hugging_face_names_tied_ones_once_and_only_on_rank_0(ranks, dtype, mode):
    found = measured(ranks, dtype, mode)["weights"]
    assert (found["missing"], found["more"], found["head"]) == ([], [], False)
    assert found["equal"]
    assert found["per_rank"] == [24, 0][:ranks]


@steps
def test_an_exported_model_loads_in_transformers_with_the_same_logits(ranks, dtype, mode):
    found = measured(ranks, dtype, mode)["export"]
    assert found["identical"]
    assert found["dtype"] == f"torch.{dtype}"
    assert found["complaints"] == 0
    assert found["text"] == "hi"
    assert found["first"] == 0
    # Policy.logprobs of the same tokens; in bfloat16 another attention kernel rounds otherwise.
    assert found["logprobs"] < (1e-5 if dtype == "float32" else 0.03)


@steps
def test_a_loaded_policy_goes_on_as_if_nothing_had_happened(ranks, dtype, mode):
    assert measured(ranks, dtype, mode)["resumed"] == {"weights": True, "next": True}


@steps
@pytest.mark.parametrize("bad", ["nan, several", "nan, rows", "steep", "high"])
def test_a_batch_that_is_not_finite_changes_nothing(ranks, dtype, mode, bad):
    found = measured(ranks, dtype, mode)["bad"][bad]
    assert found["unchanged"]
    assert found["skipped"] == 1
    assert found["grad_norm"] != found["grad_norm"]  # NaN


@steps
def test_the_batch_after_a_bad_one_steps_as_if_there_had_been_none(ranks, dtype, mode):
    assert measured(ranks, dtype, mode)["bad"]["next"] == {
        "same": True,
        "skipped": 0,
        "empty": 0,
    }


@steps
def test_a_batch_in_which_nothing_trains_is_skipped_and_moves_no_momentum(ranks, dtype, mode):
    assert measured(ranks, dtype, mode)["bad"]["empty"] == {
        "unchanged": True,
        "empty": 1,
        "skipped": 0,
        "grad_norm": 0,
        "loss": 0,
    }


@steps
def test_the_optimizer_uses_the_rate_of_the_schedule(ranks, dtype, mode):
    found = measured(ranks, dtype, mode)["rates"]
    expected = [RATE / 2, RATE, 0.0]  # warm-up of two steps, then down to the last of ten
    assert [step["rate"] for step in found] == pytest.approx(expected)
    rounding = 1e-4 if dtype == "float32" else 0.05
    assert [step["moved"] for step in found] == pytest.approx(expected, rel=rounding)


@steps
def test_adam_starts_without_a_past(ranks, dtype, mode):
    """Its first update is then as long as the rate, whatever the betas."""
    rounding = 1e-4 if dtype == "float32" else 0.05
    assert measured(ranks, dtype, mode)["first"] == pytest.approx(RATE, rel=rounding)


@halves
def test_updates_too_small_for_bfloat16_add_up_in_float32(ranks, mode):
    moved = measured(ranks, "bfloat16", mode)["small"]["moved"]
    assert moved[0] == 0  # fraction of the norms' weights that is not 1
    assert moved[-1] > 0.5


muon = pytest.mark.parametrize(
    ("ranks", "dtype"), [(ranks, dtype) for ranks in (1, 2) for dtype in ("float32", "bfloat16")]
)


@muon
def test_steps_by_muon_are_those_of_torchs_muon_and_adamw_on_the_same_gradients(ranks, dtype):
    """Bit by bit, in float32 or on float32 copies of bfloat16 weights."""
    found = measurements(ranks)[f"muon {dtype}"]
    assert (found["steps"], found["equal"]) == (3, [True] * 3)
    assert all(found["moved"].values())
    assert found["masters"] == ["torch.float32"]


@muon
def test_muon_goes_on_after_a_checkpoint_and_after_a_batch_that_is_not_finite(ranks, dtype):
    found = measurements(ranks)[f"muon {dtype}"]
    assert found["loaded"]
    assert found["skipped"] == [1, True]
    assert found["next"]


around = pytest.mark.parametrize(
    ("ranks", "mode"), [(ranks, mode) for ranks in (1, 2) for mode in UPDATE_MODES[ranks]]
)


@around
def test_a_step_towards_a_teacher_s_candidates_is_that_of_plain_torch(ranks, mode):
    found = measurements(ranks)[f"around {mode}"]["distilled"]
    assert found["error"] < 1e-5
    assert found["loss"] == pytest.approx(found["value"], rel=1e-5)
    assert found["without"] == 0  # nobody pays for candidates that no reference gave


@around
def test_what_one_rank_alone_measured_is_a_mean_over_all_tokens_and_shifts_no_other_metric(
    ranks, mode
):
    found = measurements(ranks)[f"around {mode}"]["distilled"]
    assert min(found["shares"]) > 0
    assert sum(found["shares"]) == pytest.approx(1)
    assert found["two"] == pytest.approx(2)


@around
@pytest.mark.parametrize("loss", LOSSES)
def test_recorded_slopes_of_all_ranks_are_autograd_s_of_the_whole_objective(ranks, mode, loss):
    found = measurements(ranks)[f"around {mode}"]["recorded"][loss]
    assert found["error"] < 1e-6
    assert found["different"] > 100
    assert found["trained"]
    assert found["forked"]
    # Its tokens are masked, and the group of three was rejected.
    assert found["untrained"] == ["000000.2", "000006.0", "000006.1", "000006.2"]
    seen, expected = found["observed"]  # by the first of two updates alone
    assert seen == expected > 0


@around
def test_several_updates_of_a_batch_are_plain_steps_with_the_old_logprobs_fixed(ranks, mode):
    found = measurements(ranks)[f"around {mode}"]["several"]
    assert found["steps"] == 3
    assert found["error"] < 1e-5
    measures = [name for name in found if name.startswith("mismatch ")]
    assert len(measures) == 5
    for name in ("losses", "norms", *measures):
        expected, reported = found[name]
        assert reported == pytest.approx(expected, rel=1e-5)


@around
def test_a_step_with_divergence_and_entropy_is_that_of_plain_torch(ranks, mode):
    found = measurements(ranks)[f"around {mode}"]["pulled"]
    assert found["error"] < 1e-5
    assert found["matters"] > 0.1  # without the two terms the step would be another one
    assert found["loss"] == pytest.approx(found["value"], rel=1e-5)


@around
def test_a_penalty_in_the_reward_finds_every_rank_s_part_of_a_rollout(ranks, mode):
    found = measurements(ranks)[f"around {mode}"]["penalty"]
    assert found["error"] < 1e-5
    assert found["mean"][1] == pytest.approx(found["mean"][0], rel=1e-5)
    assert found["old"] == 0  # for the penalty alone, one update keeps the sampler as its anchor


def test_an_adaptive_beta_and_a_moving_reference_survive_a_checkpoint():
    """The divergence stays far below its target: beta falls by the most, two percent a step."""
    found = measurements(1)["learner"]
    assert 0 < found["divergence"] < 0.04
    assert found["betas"] == pytest.approx([0.05, 0.05 * 0.98, 0.05 * 0.98**2], rel=1e-12)
    assert found["different"] == []


def test_where_nothing_reads_a_reference_none_is_loaded():
    assert measurements(1)["learner"]["bare"] == [True]
