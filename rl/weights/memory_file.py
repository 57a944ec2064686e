"""Weights in an anonymous file in memory, in the form of safetensors, hashed as they are written.

Every byte is copied once, from the tensor to where the reader maps it: no serialised copy beside it
and no contiguous one before it. The reader maps the file and copies nothing.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
class MemoryFile:
    """What a reader must know."""

    path: str  # readable by processes of the same user, until the file is closed
    fingerprint: str


@contextmanager
def memory_file(weights: Mapping[str, torch.Tensor]) -> Iterator[MemoryFile]:
    """Hold `weights` in a file in memory for the block; it ends with us however we end."""
    # No name to collide, no disk to fill, and the kernel frees it even if we are killed.
    descriptor = os.memfd_create("offbyone-weights")
    try:
        mark = write_weights(descriptor, weights)
        # It has no name: another process of the same user opens it through our descriptor.
        yield MemoryFile(f"/proc/{os.getpid()}/fd/{descriptor}", mark)
    finally:
        os.close(descriptor)


def write_weights(descriptor: int, weights: Mapping[str, torch.Tensor]) -> str:
    """Write all tensors, by name; return their fingerprint (rl/weights/fingerprint.py)."""
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
    os.ftruncate(descriptor, start + end)
    digest = Digest()
    with mmap.mmap(descriptor, start + end) as memory:
        memory[:start] = len(text).to_bytes(8, "little") + text
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
    return digest.name()


def read_weights(path: str, mark: str) -> dict[str, torch.Tensor]:
    """Return what was written, mapped; RuntimeError if its fingerprint is not `mark`."""
    weights = load_file(path)
    read = fingerprint(weights)
    if read != mark:
        raise RuntimeError(f"weight push: the trainer wrote {mark}, vLLM read {read} from {path}")
    return weights
