"""LoRA under every ZeRO stage, compared with plain torch and peft (adapter_worker.py measures)."""

import pytest

from tests.support.adapter_worker import GRADIENTS, KEPT, SPLITS
from tests.support.ranks import measurements

WORKER = "tests.support.adapter_worker"

gradients = pytest.mark.parametrize(
    ("ranks", "mode"), [(ranks, mode) for ranks in (1, 2) for mode in GRADIENTS[ranks]]
)
kept = pytest.mark.parametrize(
    ("ranks", "dtype", "mode", "saved"),
    [(ranks, *case) for ranks in (1, 2) for case in KEPT[ranks]],
)


def measured(ranks, name):
    return measurements(ranks, WORKER)[name]


@gradients
def test_the_update_of_the_adapter_is_its_gradient_however_the_batch_is_split(ranks, mode):
    found = measured(ranks, f"gradient {mode}")
    for split in ("lone", *SPLITS):
        assert found[split]["error"] < 1e-5
        assert found[split]["loss"] == pytest.approx(found[split]["value"], rel=1e-4)


@kept
def test_only_what_is_trained_costs_optimizer_memory(ranks, dtype, mode, saved):
    found = measured(ranks, f"{dtype} {mode}")
    shared = 1 if mode.startswith("zero0") else ranks
    assert 0 < found["optimized"] <= found["trained"] / shared * 1.1 + 64  # ZeRO pads
    assert found["trained"] < found["full"] / 2


@kept
def test_only_what_is_trained_is_in_a_checkpoint(ranks, dtype, mode, saved):
    found = measured(ranks, f"{dtype} {mode}")
    assert found["stored"] <= found["trained"]
    assert "model.safetensors" not in found["files"]


@kept
def test_a_loaded_policy_goes_on_as_if_nothing_had_happened(ranks, dtype, mode, saved):
    found = measured(ranks, f"{dtype} {mode}")
    assert found["loaded"]
    assert found["next"]


@kept
def test_frozen_weights_stay_as_they_were(ranks, dtype, mode, saved):
    assert measured(ranks, f"{dtype} {mode}")["frozen"]


@kept
def test_both_exports_have_the_logprobs_of_the_policy(ranks, dtype, mode, saved):
    found = measured(ranks, f"{dtype} {mode}")
    # In bfloat16 another attention kernel rounds otherwise, and so does merging.
    assert found["peft"] < (1e-5 if dtype == "float32" else 0.03)
    assert found["merged"] < (2e-5 if dtype == "float32" else 0.1)
    assert found["merged dtype"] == f"torch.{dtype}"
    assert found["text"] == "hi"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(
        found["files"]
    )
    assert "config.json" not in found["files"]
    # Of a base that exists nowhere else, an adapter alone would be lost.
    assert {"config.json", "model.safetensors"} <= set(found["alone"])
    assert "adapter_config.json" not in found["alone"]


@kept
def test_dropout_is_in_the_update_and_not_in_logprobs(ranks, dtype, mode, saved):
    assert measured(ranks, f"{dtype} {mode}")["quiet"] == [True, True]


@kept
def test_with_its_adapter_off_a_trained_policy_is_the_model_it_began_as(ranks, dtype, mode, saved):
    """So the base is the reference of a divergence, without a second copy."""
    found = measured(ranks, f"{dtype} {mode}")["reference"]
    assert found["base"] == 0
    assert found["policy"] > 0.01
