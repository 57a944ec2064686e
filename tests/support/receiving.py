"""A replica that a push reaches: vLLM's routes behind a socket, with the real readers behind them.

Instead of loading the weights it keeps them, so that a test can compare them. For sync=nccl and
sync=ipc without a GPU gloo replaces NCCL, and a file replaces CUDA IPC; everything else is the real
code, with buffers on the CPU.
"""

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from rl.inference import replica as routed
from rl.inference.routes import VLLMRoutes
from rl.learner.collectives import create_store
from rl.runtime.network import Address
from rl.weights.adapter import AdapterSender
from rl.weights.gloo import GlooSender, broadcast, create_group
from rl.weights.ipc import IpcReader, IpcSender
from rl.weights.nccl import NcclReader, NcclSender
from rl.weights.shm import ShmSender
from rl.weights.transport import Reader, Sender, open_reader
from tests.support.listening import PostHandler, listening
from tests.support.own_sync import RequestSender

HOST, TIMEOUT_S = "127.0.0.1", 60.0
_stores = []  # a store ends with its object


class GlooGroup:
    """The methods of an NcclGroup. The id of a group is the port of its store."""

    def __init__(self, unique_id: bytes, rank: int, size: int, device: torch.device) -> None:
        assert device.type == "cpu"
        store = TCPStore(HOST, int(unique_id), None, False, timedelta(seconds=TIMEOUT_S))
        self._group = create_group(store, rank, size, HOST, TIMEOUT_S)

    @staticmethod
    def new_id() -> bytes:
        _stores.append(create_store(HOST, 0, None, timedelta(seconds=TIMEOUT_S)))
        return str(_stores[-1].port).encode()

    def broadcast(self, buffer: torch.Tensor) -> None:
        broadcast(self._group, buffer)

    def close(self) -> None:
        self._group = None


class CpuNcclReader(NcclReader):
    group: ClassVar[type[Any]] = GlooGroup
    device: ClassVar[str] = "cpu"


@dataclass(kw_only=True)
class CpuNcclSender(NcclSender):
    reader: ClassVar[type[Reader]] = CpuNcclReader
    group: ClassVar[type[Any]] = GlooGroup
    device: ClassVar[str] = "cpu"


class CpuIpcReader(IpcReader):
    def map_memory(self, values: tuple[Any, ...]) -> torch.Tensor:
        _, path, num_bytes, *_ = values
        opened = os.open(path, os.O_RDWR)
        memory = mmap.mmap(opened, num_bytes)
        os.close(opened)
        return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(kw_only=True)
class CpuIpcSender(IpcSender):
    reader: ClassVar[type[Reader]] = CpuIpcReader
    device: ClassVar[str] = "cpu"

    def share(self, buffer: torch.Tensor) -> tuple[Any, ...]:
        opened, num_bytes = buffer.untyped_storage()._share_fd_cpu_()
        path = f"/proc/{os.getpid()}/fd/{opened}"
        return (0, path.encode(), num_bytes, 0, b"counter", 0, b"event", True)


WHOLE = {
    **{"shm": ShmSender, "gloo": GlooSender, "own": RequestSender},
    **{"nccl": CpuNcclSender, "ipc": CpuIpcSender},
}
SENDERS = {**WHOLE, "adapter": AdapterSender}


def opened(sync: str, timeout: float = 30.0, probe_every: int = 1) -> Sender:
    """Return the sender of a choice of `sync`, ready for the first push."""
    sender = SENDERS[sync](probe_every=probe_every, probe_rows=2, max_mismatch=0.05)
    sender.open(timeout)
    return sender


class FakeVLLM(PostHandler):
    """Keep the received content in its server: `routes`, `version`, `weights`, `folder`."""

    def answer(self, body: dict[str, Any]) -> bytes | dict[str, Any]:
        server: Any = self.server
        path = self.path.partition("?")[0]
        server.routes.append(path)
        if path in server.faults:
            server.faults[path]()
        match path:
            case "/get_world_size":
                return {"world_size": 1}
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                server.reader = open_reader(info["reader"], 0, info["arguments"])
            case "/v1/load_lora_adapter":
                return self.load_adapter(Path(body["lora_path"]))
            case "/update_weights":
                info = body["update_info"]
                read = server.reader.read(server.lie or info["fingerprint"], **info["source"])
                server.weights = {name: tensor.clone() for name, tensor in read.items()}
            case "/finish_weight_update" if "weight_version" in body:
                server.version = int(body["weight_version"])
            case "/update_weight_version":
                server.version = int(body["new_version"])
            case "/inference/v1/generate":
                scores = [{str(t): {"logprob": -t / 8}} for t in body["token_ids"][1:]]
                return {"prompt_logprobs": [None, *scores]}
        return {}

    def load_adapter(self, folder: Path) -> bytes:
        server: Any = self.server
        assert folder.stat().st_mode & 0o777 == 0o700
        server.form = json.loads((folder / "adapter_config.json").read_text())
        server.first, server.folder = load_file(folder / "adapter_model.safetensors"), folder
        return b"Success"


class Replica:
    """A replica as a test sees it; `server` holds what it received."""

    def __init__(self, name: str, server: Any, timeout: float) -> None:
        self.server, where = server, server.server_address
        address = Address(path=Path(where)) if isinstance(where, str) else Address(None, *where)
        self.receiver = VLLMRoutes(routed.Replica(name, address), timeout=timeout)

    def holds(self, weights: dict[str, torch.Tensor], version: int) -> bool:
        """Return whether it would sample with these weights, as this version."""
        got = self.server.weights
        same = got.keys() == weights.keys() and all(
            tensor.dtype == got[name].dtype and torch.equal(tensor, got[name])
            for name, tensor in weights.items()
        )
        return same and self.server.version == version and self.server.routes[-1] == "/resume"


@contextmanager
def replica(
    socket: Path | None, name: str = "inference", *, timeout: float = 30.0
) -> Iterator[Replica]:
    """Serve a replica, on a port if there is no socket.

    `server.faults` maps a route to what it does before it answers; `server.lie` is a fingerprint to
    expect instead of the one that was sent.
    """
    with listening(socket, FakeVLLM) as server:
        server: Any
        server.routes, server.faults, server.lie = [], {}, ""
        server.weights, server.version, server.reader = {}, -1, None
        yield Replica(name, server, timeout)


def refuse() -> None:
    """Fail as a route of vLLM that refuses."""
    raise RuntimeError("it refuses")
