"""Write weights to an anonymous memory file (memfd), in safetensors format, and hash them.

Each tensor is copied directly into the file. A process on the same host maps the file and need not
copy it. New weights overwrite the previous ones, because newly allocated memory costs
more time than the copy (page faults and zeroing). A trainer on a GPU registers the memory with
CUDA, because a GPU copies into registered memory at 53 GB/s and into other memory at 2 GB/s
(H100). The operating system frees an anonymous file even if the trainer is killed, but a file in
/dev/shm would remain.
"""

import json
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from safetensors.torch import _TYPES, load_file

from rl.weights.fingerprint import combine_hashes, fingerprint, tensor_hash

_DTYPES = {dtype: name for name, dtype in _TYPES.items()}  # names of dtypes in safetensors


class MemoryFile:
    """An anonymous file in memory, which exists until `close` or until this process ends."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("offbyone-weights")
        self._memory: mmap.mmap | None = None
        self._registered = 0  # address of the memory registered with CUDA, or 0
        self._header = b""  # header of the last write, or b"" if the memory is new
        self.views: dict[str, torch.Tensor] = {}  # the written weights, as views of the memory

    def close(self) -> None:
        self._unmap()
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """The path under which processes of the same user can open the file, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def content(self) -> mmap.mmap:
        """The bytes of the file. Release all views of them before `write`, which may unmap them."""
        assert self._memory is not None
        return self._memory

    def write(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Replace the file's content with `weights`. Return their fingerprint.

        Before the call, the caller must wait until no reader uses the previous weights any more.
        """
        # A safetensors file contains the header's length (8 bytes), the header, and the tensors.
        header, end = layout(weights)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # start the first tensor at a multiple of 8
        start = 8 + len(text)
        if text != self._header:  # other names, shapes or dtypes than in the last write
            memory = self.resize(start + end)
            self._register()
            memory[:start] = len(text).to_bytes(8, "little") + text
            self._header, self.views = text, {}
            for name, entry in header.items():
                self.views[name] = _view(memory, weights[name], start + entry["data_offsets"][0])

        def copy_and_hash(name: str) -> int:
            view, tensor = self.views[name], weights[name].detach()
            if view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor)
            return tensor_hash(view)

        return combine_hashes(weights, copy_and_hash)

    def resize(self, num_bytes: int) -> mmap.mmap:
        """Resize the file to `num_bytes` and return its memory, whose content is then undefined."""
        if self._memory is None or len(self._memory) != num_bytes:
            self._unmap()
            os.ftruncate(self._descriptor, num_bytes)
            self._memory = mmap.mmap(self._descriptor, num_bytes)
        return self._memory

    def _register(self) -> None:
        """Register the memory with CUDA. If CUDA refuses, copies from the GPU are slower."""
        if self._registered or not torch.cuda.is_initialized():
            return
        address = torch.frombuffer(self.content, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, len(self.content), 0)) == 0:
            self._registered = address
            return
        # Launch a kernel that raises CUDA's stored error, so that no later kernel raises it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")

    def _unmap(self) -> None:
        # Drop the views, because no tensor may use the memory after it is unmapped.
        self._header, self.views = b"", {}
        if self._registered:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._registered)
            self._registered = 0
        if self._memory is not None:
            self._memory.close()


def layout(weights: Mapping[str, torch.Tensor], alignment: int = 1) -> tuple[dict[str, Any], int]:
    """Return safetensors' header and the end offset. Tensors start at multiples of `alignment`."""
    header, end = {}, 0
    # Place large elements first, so that every tensor starts at a multiple of its element's size.
    for name in sorted(weights, key=lambda name: (-weights[name].element_size(), name)):
        tensor = weights[name]
        begin = -(-end // alignment) * alignment
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    return header, end


def _view(memory: mmap.mmap, like: torch.Tensor, offset: int) -> torch.Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.view(like.shape)


def read_weights(path: str, expected: str) -> dict[str, torch.Tensor]:
    return require_fingerprint(load_file(path), expected)


def require_fingerprint(
    weights: dict[str, torch.Tensor], expected: str, actual: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights. Raise RuntimeError unless their hash (or `actual`) is `expected`."""
    actual = actual or fingerprint(weights)
    if actual != expected:
        what = f"the trainer wrote {expected}, vLLM read {actual}"
        raise RuntimeError(f"weight push: the fingerprints differ ({what})")
    return weights
