"""Two sets of weights share a fingerprint exactly when they are the same."""

import pytest
import torch

from rl.weights.fingerprint import fingerprint

torch.set_num_threads(1)


def weights():
    return {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.arange(4, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
    }


def test_it_is_16_hex_digits_whatever_the_order_and_the_strides():
    found = fingerprint(weights())
    assert len(found) == 16
    assert int(found, 16) >= 0
    assert fingerprint(dict(reversed(weights().items()))) == found
    transposed = weights()["a"].t().contiguous().t()
    assert not transposed.is_contiguous()
    assert fingerprint(weights() | {"a": transposed}) == found
    assert fingerprint(weights() | {"a": weights()["a"].requires_grad_()}) == found


CHANGES = {
    "one bit": {"b": torch.tensor([0, 1, 2, 3.015625], dtype=torch.bfloat16)},
    "sign of zero": {"a": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])},
    "shape": {"a": torch.arange(6, dtype=torch.float32).reshape(3, 2)},
    "shape of nothing": {"empty": torch.zeros(3, 0)},
    "dtype of the same bytes": {"b": weights()["b"].view(torch.int16)},
    "one more": {"c": torch.zeros(0)},
    "swapped": {"a": weights()["b"], "b": weights()["a"]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_shows(change):
    assert fingerprint(weights() | CHANGES[change]) != fingerprint(weights())


def test_a_renamed_or_missing_tensor_shows():
    missing = {name: tensor for name, tensor in weights().items() if name != "b"}
    assert len({fingerprint(w) for w in (weights(), missing, missing | {"B": weights()["b"]})}) == 3
