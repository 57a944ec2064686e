"""sync=nccl and sync=ipc where there is no GPU: gloo replaces NCCL, and a file replaces CUDA IPC.

Everything else is the real code, with buffers on the CPU.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from rl.learner.collectives import create_store
from rl.weights.fingerprint import fingerprint
from rl.weights.gloo import broadcast, create_group
from rl.weights.ipc import IpcReader, IpcSender
from rl.weights.nccl import NcclReader, NcclSender
from rl.weights.transport import Reader

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


class Model(torch.nn.Module):
    """A model whose parameters have the given names, each of a layer of its own."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            owner, _, leaf = name.rpartition(".")
            layer = torch.nn.Module()
            empty = torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            layer.register_parameter(leaf, empty)
            self.add_module(owner, layer)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)
        return {name for name, _ in weights}


def engine_worker(number: int, calls: Connection, weights: dict[str, torch.Tensor]) -> None:
    """Answer the requests of a push with our engine of vLLM, which loads and compares a model."""
    from rl.weights import vllm_plugin

    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    vllm_plugin.initialize_layerwise_reload = nothing  # they need a model of vLLM's
    vllm_plugin.finalize_layerwise_reload = nothing
    engine: Any = object.__new__(vllm_plugin.WholeWeightsEngine)
    engine.model, engine.model_config = Model(weights), None
    engine.parallel_config = SimpleNamespace(tensor_parallel_size=1, rank=number)
    calls.send("ready")  # after the import, which takes longer than a push may
    while call := calls.recv():
        try:
            if "reader" in call:
                engine.init_transfer_engine(engine.parse_init_info(call))
            else:
                engine.receive_weights(engine.parse_update_info(call))
                engine.finish_weight_update()
            calls.send({"held": fingerprint(dict(engine.model.named_parameters()))})
        except RuntimeError as error:
            calls.send({"error": str(error)})
