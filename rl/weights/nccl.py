"""Push all weights between GPUs with NCCL, on one host or several. No GPU has run this code yet.

Trainer and workers call NCCL themselves, as vLLM's PyNcclCommunicator does. Three parts of vLLM
0.32 are not used. NCCLWeightTransferEngine drops the weights before the plugin can compare the
model with them. Importing NCCLTrainerWeightTransferEngine takes 3 to 12 s, disables cuDNN's
attention and patches inductor on rank 0 only. StatelessProcessGroup unpickles data from a port,
so the trainer's request to vLLM contains the id of the group instead.
"""

import ctypes
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch.cuda import nccl

from rl.inference.routes import VLLMRoutes
from rl.weights.group import GroupSender, run_in_thread, wait_for
from rl.weights.packed import PackedSender, unpack
from rl.weights.transport import Reader

UINT8 = 1  # value of ncclUint8 in ncclDataType_t


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
ARGUMENTS: dict[str, list[Any]] = {  # argument types of the NCCL functions called by this module
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, UniqueId, _INT],
    "ncclBroadcast": [_POINTER, _POINTER, ctypes.c_size_t, _INT, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


@cache
def _nccl() -> ctypes.CDLL:
    """Return PyTorch's NCCL library. Its functions raise RuntimeError if they fail."""
    library = ctypes.CDLL("libnccl.so.2")
    for name, arguments in ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).errcheck = _raise_on_error
    return library


def _raise_on_error(status: int, function: Any, _: Any) -> None:
    if status:
        raise RuntimeError(f"{function.__name__} returned {status}: set NCCL_DEBUG=WARN to see why")


class NcclGroup:
    """One rank of an NCCL group. Its calls select the rank's GPU, because new threads use GPU 0."""

    new_id = staticmethod(nccl.unique_id)

    def __init__(self, unique_id: bytes, rank: int, size: int, device: torch.device) -> None:
        self._device, self._group = device, ctypes.c_void_p()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            unique = UniqueId.from_buffer_copy(unique_id)
            _nccl().ncclCommInitRank(ctypes.byref(self._group), size, unique, rank)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send the bytes [N] of rank 0 to all other ranks, and wait until they have arrived."""
        with torch.cuda.device(self._device):
            at, to = buffer.data_ptr(), (self._group, self._stream.cuda_stream)
            _nccl().ncclBroadcast(at, at, len(buffer), UINT8, 0, *to)
            self._stream.synchronize()

    def close(self) -> None:
        """Abort the group, which also ends a broadcast that waits on the GPU for a dead rank."""
        _nccl().ncclCommAbort(self._group)


class NcclReader(Reader):
    """The receiver in a vLLM worker. It keeps its buffer on its GPU for the next push."""

    group: ClassVar[type[Any]] = NcclGroup
    device: ClassVar[str] = "cuda"

    def __init__(self, worker: int, *, unique_id: str, size: int, timeout: float) -> None:
        self._timeout, self._buffer = timeout, torch.empty(0, device=self.device)
        unique, device = b64decode(unique_id), self._buffer.device
        joined = run_in_thread(lambda: self.group(unique, 1 + worker, size, device))
        self._group = wait_for(joined, timeout, "the trainer to join the group")

    def read(self, fingerprint: str, *, num_bytes: int, **packed: Any) -> dict[str, torch.Tensor]:
        """Receive the broadcast and return its weights. The next push overwrites their memory."""
        if len(self._buffer) != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        received = run_in_thread(lambda: self._group.broadcast(self._buffer))
        wait_for(received, self._timeout, "the weights of the trainer")
        return unpack(self._buffer, **packed, fingerprint=fingerprint)

    def close(self) -> None:
        self._group.close()


@dataclass(kw_only=True)
class NcclSender(GroupSender, PackedSender):
    """The sender over NCCL (conf/sync/nccl.yaml)."""

    reader: ClassVar[type[Reader]] = NcclReader
    group: ClassVar[type[Any]] = NcclGroup
    reader_copy: ClassVar[bool] = True
    own_gpus: ClassVar[bool] = True
    library: ClassVar[str] = "nccl"

    def rendezvous(self, vllm: VLLMRoutes, size: int) -> tuple[dict[str, Any], Callable[[], Any]]:  # noqa: ARG002 the id contains the address
        unique, device = self.group.new_id(), self.buffer.device
        text = b64encode(unique).decode()
        arguments = {"unique_id": text, "size": size, "timeout": self._timeout}
        return arguments, lambda: self.group(unique, 0, size, device)

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:
        return {"num_bytes": len(self.buffer), **super().source(vllm)}

    def broadcast_to(self, name: str) -> None:
        self._groups[name].broadcast(self.buffer)

    def leave(self, name: str) -> None:
        if group := self._groups.pop(name, None):
            with suppress(RuntimeError):  # an error of `close` would hide that of the push
                group.close()
