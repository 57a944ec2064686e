"""Weights on their way to vLLM: to another process on the same GPU, and through memory."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from typing import Any

import torch
import torch.multiprocessing as mp
import xxhash
from transformers import AutoModelForCausalLM

from benchmarks.first_hour.update import config, seconds
from rl.weights.memory_file import MemoryFile

ENGINES = (
    "vllm.distributed.weight_transfer.factory",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.distributed.weight_transfer.ipc_engine",
)


def _weights(size: str, device: torch.device, tiny: bool) -> dict[str, torch.Tensor]:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(size, tiny), dtype=torch.bfloat16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _receive(inbox: Any, outbox: Any) -> None:
    """Answer each list of tensors with the sum of their values; a None ends the process."""
    while (tensors := inbox.get()) is not None:
        outbox.put(sum(float(tensor.sum(dtype=torch.float32)) for tensor in tensors))
        del tensors


def ipc(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time to hand tensors to another process: a handle for each, or one buffer."""
    weights = [*_weights("0.6b", device, tiny).values()]
    packed = torch.cat([tensor.flatten() for tensor in weights])
    expected = sum(float(tensor.sum(dtype=torch.float32)) for tensor in weights)
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(inbox, outbox), daemon=True)
    process.start()
    inbox.put([packed[:1]])  # the first message pays for the start of the process
    outbox.get(timeout=120)
    for name, sent in (("a handle for each tensor", weights), ("one buffer", [packed])):
        began = time.perf_counter()
        inbox.put(sent)
        found = outbox.get(timeout=120)
        took = time.perf_counter() - began
        is_right = abs(found - expected) < 1e-3 * max(abs(expected), 1.0)
        yield {"sent": name, "tensors": len(sent), "ms": round(1000 * took, 1), "right": is_right}
    inbox.put(None)
    process.join(60)


def push(size: str, device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of each part of a push of all weights through the memory file."""
    weights = _weights(size, device, tiny)
    total = sum(tensor.nbytes for tensor in weights.values())
    with closing(MemoryFile()) as file:
        file.write(weights)  # the first write pays for the pages
        yield _rate("write", total, seconds(lambda: file.write(weights), device, repeats=3))
        with memoryview(file.content) as content:
            yield _rate("hash", total, seconds(lambda: xxhash.xxh3_64(content), device, repeats=1))
        host = {name: tensor.cpu() for name, tensor in weights.items()}
        yield _rate("copy and hash", total, seconds(lambda: file.write(host), device, repeats=3))
        collect = seconds(lambda: [x.cpu() for x in weights.values()], device, repeats=1)
        yield _rate("collect", total, collect)


def _rate(name: str, size: int, took: float) -> dict[str, Any]:
    return {"part": name, "ms": round(1000 * took, 1), "gb_per_s": round(size / took / 1e9, 2)}


def engines(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """Yield whether vLLM's engine classes can be imported from VLLM_SOURCE, an unpacked wheel."""
    sys.path.insert(0, os.environ.get("VLLM_SOURCE", ""))
    for name in ENGINES:
        try:
            import_module(name)
            yield {"module": name, "result": "imported"}
        except Exception as error:  # noqa: BLE001 the error is the result
            text = str(error).splitlines() or [""]
            yield {"module": name, "result": f"{type(error).__name__}: {text[0]}"}
