"""Weights in a file in memory are read as they were written, and fingerprints of weights."""

import os
from contextlib import closing

import pytest
import torch

from rl.weights.fingerprint import fingerprint
from rl.weights.memory_file import MemoryFile, read_weights

torch.set_num_threads(1)
WEIGHTS = {
    "b.weight": torch.randn(5, 3).bfloat16(),
    "a.transposed": torch.randn(4, 6).T,
    "a.slice": torch.randn(9, 8)[1::2, 3:],
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(2.5),
    "odd": torch.randn(3).half(),  # six bytes
    "a.count": torch.tensor([3, -4]),
    "a.flags": torch.tensor([True, False, True]),
    "trained": torch.nn.Parameter(torch.randn(2, 2).double()),
}


def test_any_tensor_is_read_as_it_was_until_the_file_ends_with_the_block():
    before = set(os.listdir("/proc/self/fd"))
    with closing(MemoryFile()) as file:
        written, path = file.write(WEIGHTS), file.path
        read = read_weights(path, written)
        assert read.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0)
            assert read[name].data_ptr() % tensor.element_size() == 0
        # In any order of the names and with any strides.
        assert written == fingerprint(WEIGHTS) == fingerprint(dict(reversed(read.items())))
        for width in (4, 4, 9, 2):  # other weights of the same size, more, less
            weights = {"w": torch.randn(3, width)}
            read = read_weights(path, file.write(weights))
            torch.testing.assert_close(read["w"], weights["w"], rtol=0, atol=0)
        del read
    assert not os.path.exists(path)
    assert set(os.listdir("/proc/self/fd")) <= before  # sockets of other tests may close meanwhile


def test_other_weights_than_expected_are_refused():
    with closing(MemoryFile()) as file:
        before = file.write(WEIGHTS)
        changed = {name: tensor.detach().clone() for name, tensor in WEIGHTS.items()}
        changed["b.weight"][4, 2] += 1
        after = file.write(changed)
        with pytest.raises(RuntimeError, match=f"trainer wrote {before}, vLLM read {after}"):
            read_weights(file.path, before)
        with open(file.path, "r+b") as content:
            content.seek(-1, os.SEEK_END)
            content.write(b"!")
        with pytest.raises(RuntimeError, match=f"trainer wrote {after}, vLLM read"):
            read_weights(file.path, after)


FEW = {
    **{"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "empty": torch.zeros(0, 3)},
    **{"b": torch.arange(4, dtype=torch.bfloat16), "scalar": torch.tensor(1.5)},
}


def test_every_difference_shows_in_the_fingerprint():
    missing = {name: tensor for name, tensor in FEW.items() if name != "b"}
    changes = {
        "one bit": {"b": torch.tensor([0, 1, 2, 3.015625], dtype=torch.bfloat16)},
        "sign of zero": {"a": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])},
        "shape": {"a": torch.arange(6, dtype=torch.float32).reshape(3, 2)},
        "shape of nothing": {"empty": torch.zeros(3, 0)},
        "dtype of the same bytes": {"b": FEW["b"].view(torch.int16)},
        "one more": {"c": torch.zeros(0)},
        "swapped": {"a": FEW["b"], "b": FEW["a"]},
    }
    others = {name: FEW | change for name, change in changes.items()}
    others |= {"one less": missing, "renamed": missing | {"B": FEW["b"]}}
    names_of = {fingerprint(FEW): "unchanged"}
    for name, weights in others.items():
        assert names_of.setdefault(fingerprint(weights), name) == name
