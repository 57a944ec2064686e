"""Weights in a file in memory: what is read is what was written, and nothing is left behind."""

import os
from pathlib import Path

import pytest
import torch

from rl.weights.fingerprint import fingerprint
from rl.weights.memory_file import memory_file, read_weights

WEIGHTS = {
    "b.weight": torch.randn(5, 3).bfloat16(),
    "a.transposed": torch.randn(4, 6).T,
    "a.slice": torch.randn(9, 8)[1::2, 3:],
    "empty": torch.empty(0, 7),
    "scalar": torch.tensor(2.5),
    "odd": torch.randn(3).half(),  # six bytes: what follows begins off its own size
    "trained": torch.nn.Parameter(torch.randn(2, 2).double()),
}


def test_any_tensor_is_read_as_it_was():
    with memory_file(WEIGHTS) as file:
        found = read_weights(file.path, file.fingerprint)
        assert found.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=0)
        assert file.fingerprint == fingerprint(WEIGHTS) == fingerprint(found)


def test_what_a_writer_changes_afterwards_changes_the_fingerprint():
    weights = {name: tensor.detach().clone() for name, tensor in WEIGHTS.items()}
    with memory_file(weights) as before:
        weights["b.weight"][4, 2] += 1
        with memory_file(weights) as after:
            assert before.fingerprint != after.fingerprint


def test_the_file_ends_with_the_block_however_it_ends():
    before = set(os.listdir("/proc/self/fd"))
    paths = []

    def fail() -> None:
        with memory_file(WEIGHTS) as file:
            paths.append(Path(file.path))
            assert paths[0].exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not paths[0].exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_that_holds_anything_else_is_refused():
    with memory_file(WEIGHTS) as file:
        with pytest.raises(RuntimeError, match="trainer wrote 0123, vLLM read"):
            read_weights(file.path, "0123")
        with open(file.path, "r+b") as written:
            written.seek(-1, os.SEEK_END)
            written.write(b"!")
        with pytest.raises(RuntimeError, match=f"trainer wrote {file.fingerprint}, vLLM read"):
            read_weights(file.path, file.fingerprint)
