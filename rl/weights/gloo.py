"""Push all weights over TCP with torch.distributed's gloo, for hosts that share only a network.

The trainer sends the packed bytes (rl/weights/memory_file.py) once per replica, in pieces.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroupGloo, Store, TCPStore

from rl.inference.routes import VLLMRoutes
from rl.learner.collectives import create_store
from rl.weights.group import GroupSender
from rl.weights.memory_file import MemoryFile, read_weights
from rl.weights.transport import Reader

# Weights are sent in pieces of this many bytes. A piece should fit into the CPU cache, because the
# operating system copies it twice.
_PIECE_BYTES = 1 << 24


class GlooReader(Reader):
    """The receiver in a vLLM worker, which has rank 1 or higher in the replica's process group."""

    def __init__(self, worker: int, *, host: str, port: int, size: int, timeout: float) -> None:
        self._file = MemoryFile()
        store = TCPStore(host, port, None, False, timedelta(seconds=timeout))
        self._group = create_group(store, 1 + worker, size, source_address(host, port), timeout)

    def read(self, fingerprint: str, *, num_bytes: int) -> dict[str, torch.Tensor]:
        """Receive the broadcast and return its weights. The next push overwrites their memory."""
        broadcast(self._group, torch.frombuffer(self._file.resize(num_bytes), dtype=torch.uint8))
        return read_weights(self._file.path, fingerprint)

    def close(self) -> None:
        self._file.close()


@dataclass(kw_only=True)
class GlooSender(GroupSender):
    """The sender over TCP. It has rank 0 in each replica's process group (conf/sync/gloo.yaml)."""

    reader: ClassVar[type[Reader]] = GlooReader
    reader_copy: ClassVar[bool] = True
    library: ClassVar[str] = "gloo"

    def rendezvous(self, vllm: VLLMRoutes, size: int) -> tuple[dict[str, Any], Callable[[], Any]]:
        to = vllm.replica.address
        host = "127.0.0.1" if to.path else source_address(to.host, to.port)
        store = create_store(host, 0, None, timedelta(seconds=self._timeout))
        arguments = {"host": host, "port": store.port, "size": size, "timeout": self._timeout}
        return arguments, lambda: create_group(store, 0, size, host, self._timeout)

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:  # noqa: ARG002 the same for every vLLM
        return {"num_bytes": len(self._file.content)}

    def broadcast_to(self, name: str) -> None:
        # Keep only the group's id, because a reference would keep connections open after `del`.
        error, group_id = "", id(self._groups[name])
        try:
            broadcast(self._groups[name], torch.frombuffer(self._file.content, dtype=torch.uint8))
        except RuntimeError as failure:
            error = str(failure)
        if error:
            # Deleting the group closes its connections, so the replica's workers stop waiting.
            # If the replica has been restarted since, keep its new group.
            if id(self._groups.get(name)) == group_id:
                del self._groups[name]
            raise RuntimeError(error)


def create_group(store: Store, rank: int, size: int, host: str, timeout: float) -> Any:
    backend: Any = ProcessGroupGloo  # PyTorch's annotations lack the attributes below
    options = backend._Options()
    options._devices = [backend.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return backend(store, rank, size, options)


def broadcast(group: Any, content: torch.Tensor) -> None:
    """Copy the bytes `content` [N] of rank 0 into `content` of all other ranks. Collective."""
    for piece in content.split(_PIECE_BYTES):
        group.broadcast(piece, 0).wait()


def source_address(host: str, port: int) -> str:
    """Return the address from which this machine connects to a host. No packet is sent."""
    family, kind, *_, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(remote)
        return probe.getsockname()[0]
