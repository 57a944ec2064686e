"""Through TCP by torch.distributed's gloo: between hosts that share nothing but a network.

Trainer rank 0 and the workers of one replica are a process group of their own: no other replica
notices when one of them dies, and one that comes back is just another group. The trainer sends the
bytes once a replica, to all of its workers, packed (rl/weights/memory_file.py) and a piece at a
time.

The broadcast runs on a thread beside the request that makes vLLM take part: whichever of the two
fails, the request has a deadline. A peer that hangs keeps the thread until the group's own.
"""

import socket
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroupGloo, Store, TCPStore

from rl.inference.routes import VLLMRoutes
from rl.run.failure import RunFailed
from rl.weights.memory_file import MemoryFile, read_weights
from rl.weights.transport import Weights, WholeWeights, load_whole

T = TypeVar("T")

_PIECE = 1 << 24  # bytes; larger ones leave the cache between two copies of the kernel's
_LOOPBACK = "127.0.0.1"


class GlooSender(WholeWeights):
    """Rank 0 of one group a replica."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that any wait for the other end may take."""
        self._timeout = timeout
        self._file, self._mark = MemoryFile(), ""
        self._groups: dict[str, Any] = {}

    def pack(self, weights: Weights) -> str:
        """Lay them end to end; return their fingerprint."""
        self._mark = self._file.write(weights).fingerprint
        return self._mark

    def connect(self, vllm: VLLMRoutes) -> None:
        """Make a group with all workers of a vLLM, in the place of the one before its restart."""
        self._groups.pop(vllm.replica.name, None)
        size = 1 + vllm.num_workers()
        to = vllm.replica.address
        host = _LOOPBACK if to.path else own_address(to.host, to.port)
        store = listening_store(host, self._timeout)
        facts = {"host": host, "port": store.port, "size": size, "timeout": self._timeout}
        joined = _beside(lambda: group(store, 0, size, host, self._timeout))
        vllm.init_transfer({"transport": "gloo", "facts": facts})
        self._groups[vllm.replica.name] = self._outcome(joined)

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Broadcast to its workers while it loads them."""
        sent = _beside(lambda: self._broadcast(vllm.replica.name))
        load_whole(vllm, version, self._mark, {"num_bytes": len(self._file.content)})
        self._outcome(sent)

    def _broadcast(self, name: str) -> None:
        error, members = "", id(self._groups[name])  # to hold it would hold its connections, too
        try:
            broadcast(self._groups[name], torch.frombuffer(self._file.content, dtype=torch.uint8))
        except RuntimeError as failure:
            error = str(failure)
        if error:
            # Its end closes the connections, so the workers that are left do not wait for more. In
            # the place of one that hung may stand that of the replica's next incarnation.
            if id(self._groups.get(name)) == members:
                del self._groups[name]
            raise RuntimeError(error)

    def _outcome(self, future: Future[T]) -> T:
        """What came of the thread, once vLLM has answered that its own end is done."""
        try:
            return future.result(self._timeout)
        except (RuntimeError, TimeoutError) as error:
            raise RunFailed(f"gloo between the trainer and vLLM failed: {error}") from error


class GlooReader:
    """A worker of a replica, which is rank 1 or higher of its group."""

    def __init__(self, worker: int, *, host: str, port: int, size: int, timeout: float) -> None:
        self._file = MemoryFile()
        store = TCPStore(host, port, None, False, timedelta(seconds=timeout))
        self._group = group(store, 1 + worker, size, own_address(host, port), timeout)

    def read(self, mark: str, *, num_bytes: int) -> dict[str, torch.Tensor]:
        """Take part in the broadcast; return what came, in memory that the next one writes over."""
        broadcast(self._group, torch.frombuffer(self._file.of_size(num_bytes), dtype=torch.uint8))
        return read_weights(self._file.path, mark)

    def close(self) -> None:
        """Give the memory back."""
        self._file.close()


def _beside(work: Callable[[], T]) -> Future[T]:
    """Do it on a thread that keeps no process alive: gloo cannot be interrupted."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except RuntimeError as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def listening_store(host: str, timeout: float) -> TCPStore:
    """Where the members of a group find each other. By itself it would listen on every address."""
    with socket.create_server((host, 0), family=_family(host)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def group(store: Store, rank: int, size: int, host: str, timeout: float) -> Any:
    """Join a group that is nobody's default, through the interface that has this address."""
    backend: Any = ProcessGroupGloo  # PyTorch's types know less of it
    options = backend._Options()
    options._devices = [backend.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return backend(store, rank, size, options)


def broadcast(members: Any, content: torch.Tensor) -> None:
    """Rank 0's bytes [N] to all others."""
    for piece in content.split(_PIECE):
        members.broadcast(piece, 0).wait()


def own_address(host: str, port: int) -> str:
    """The address of ours that another one sees; nothing is sent to find out."""
    family, kind, *_, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(remote)
        return probe.getsockname()[0]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
