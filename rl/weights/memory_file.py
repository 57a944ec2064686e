"""Weights in an anonymous file in memory, in the form of safetensors, hashed as they are written.

Every byte is copied once, from the tensor to where it is mapped or sent from: no serialised copy
beside it and no contiguous one before it. Who maps the file copies nothing. The next weights are
written over the last ones: memory that is new costs more than the copy (a fault and zeros a page).
"""

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

from rl.weights.fingerprint import Digest, fingerprint

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}  # their names in safetensors


@dataclass(frozen=True)
class WrittenWeights:
    """What a reader must know. It must have let go of them when the next ones are written."""

    path: str  # readable by processes of the same user, until the file is closed
    fingerprint: str


class MemoryFile:
    """A file in memory; it ends with `close`, or with us however we end."""

    def __init__(self) -> None:
        # No name to collide, no disk to fill, and the kernel frees it even if we are killed.
        self._descriptor = os.memfd_create("offbyone-weights")
        self._memory: mmap.mmap | None = None

    def __enter__(self) -> "MemoryFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, once no reader maps it either."""
        if self._memory is not None:
            self._memory.close()
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """Where processes of the same user open it: it has no name, but we hold it open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def content(self) -> mmap.mmap:
        """All bytes of it, to be read or sent; whoever looks lets go before it is written again."""
        assert self._memory is not None
        return self._memory

    def write(self, weights: Mapping[str, torch.Tensor]) -> WrittenWeights:
        """Hold these in the place of what was held, by name (rl/weights/fingerprint.py)."""
        # safetensors: the header's length in 8 bytes, the header, the tensors end to end.
        header, end = {}, 0
        for name in sorted(weights):
            tensor = weights[name]
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        start = 8 + len(text)
        memory = self.of_size(start + end)
        memory[:start] = len(text).to_bytes(8, "little") + text
        digest = Digest()
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensor = weights[name].detach()
            if begin < end:
                place = torch.frombuffer(
                    memory, dtype=tensor.dtype, count=tensor.numel(), offset=start + begin
                )
                place.view(tensor.shape).copy_(tensor)
                del place  # a mapping that is looked at cannot be closed
            with memoryview(memory)[start + begin : start + end] as content:
                digest.add(name, tensor, content)  # while it is still in the cache
        return WrittenWeights(self.path, digest.name())

    def of_size(self, num_bytes: int) -> mmap.mmap:
        """Return room for so many bytes, which hold anything."""
        if self._memory is None or len(self._memory) != num_bytes:
            if self._memory is not None:
                self._memory.close()
            os.ftruncate(self._descriptor, num_bytes)
            self._memory = mmap.mmap(self._descriptor, num_bytes)
        return self._memory


def read_weights(path: str, mark: str) -> dict[str, torch.Tensor]:
    """Return what was written, mapped; RuntimeError if its fingerprint is not `mark`."""
    return checked(load_file(path), mark)


def checked(weights: dict[str, torch.Tensor], mark: str) -> dict[str, torch.Tensor]:
    """Return the weights; RuntimeError if their fingerprint is not `mark`."""
    read = fingerprint(weights)
    if read != mark:
        raise RuntimeError(f"weight push: the trainer wrote {mark}, vLLM read {read}")
    return weights
