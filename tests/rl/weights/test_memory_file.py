"""Weights in a file in memory: what is read is what was written, and nothing is left behind."""

import os
from pathlib import Path

import pytest
import torch

from rl.weights.fingerprint import fingerprint
from rl.weights.memory_file import MemoryFile, read_weights

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
    with MemoryFile() as file:
        written = file.write(WEIGHTS)
        read = read_weights(written.path, written.fingerprint)
        assert read.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0)
        assert written.fingerprint == fingerprint(WEIGHTS) == fingerprint(read)


def test_the_next_weights_take_the_place_of_the_last_ones_whatever_their_size():
    with MemoryFile() as file:
        for seed, width in ((0, 4), (1, 4), (2, 9), (3, 2)):  # the same size, more, less
            weights = {"w": torch.randn(3, width, generator=torch.Generator().manual_seed(seed))}
            written = file.write(weights)
            read = read_weights(written.path, written.fingerprint)
            torch.testing.assert_close(read["w"], weights["w"], rtol=0, atol=0)


def test_one_changed_number_changes_the_fingerprint():
    weights = {name: tensor.detach().clone() for name, tensor in WEIGHTS.items()}
    with MemoryFile() as file:
        before = file.write(weights)
        weights["b.weight"][4, 2] += 1
        after = file.write(weights)
        assert before.fingerprint != after.fingerprint
        with pytest.raises(RuntimeError, match=f"trainer wrote {before.fingerprint}"):
            read_weights(before.path, before.fingerprint)  # they are gone


def test_the_file_ends_with_the_block_however_it_ends():
    before = set(os.listdir("/proc/self/fd"))
    paths = []

    def fail() -> None:
        with MemoryFile() as file:
            paths.append(Path(file.write(WEIGHTS).path))
            assert paths[0].exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not paths[0].exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_that_holds_anything_else_is_refused():
    with MemoryFile() as file:
        written = file.write(WEIGHTS)
        with pytest.raises(RuntimeError, match="trainer wrote 0123, vLLM read"):
            read_weights(written.path, "0123")
        with open(written.path, "r+b") as content:
            content.seek(-1, os.SEEK_END)
            content.write(b"!")
        with pytest.raises(RuntimeError, match=f"trainer wrote {written.fingerprint}, vLLM read"):
            read_weights(written.path, written.fingerprint)
