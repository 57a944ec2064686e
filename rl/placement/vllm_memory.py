"""How much memory one vLLM takes, from sizes and settings alone."""

from collections.abc import Mapping
from typing import Any

from rl.config.transport import transport
from rl.model.shape import GIB, Shape
from rl.placement.trainer_memory import Need, bytes_a_number

_RUNTIME = 1.2 * GIB  # its two processes on CPU, libraries counted once
_PER_WORKER = 0.6 * GIB  # of a tensor parallel group, which is not forked
# On CPU a push leaves copies behind: what the kernels want, and what the allocator keeps.
_WEIGHTS_ON_CPU = 1.3
_CUDA_RUNTIME = 1.5 * GIB  # context, CUDA graphs, the largest forward pass
_CUDA_HOST = 4.0 * GIB
_UTILIZATION = 0.92  # of a GPU, as vLLM 0.32 has it


def vllm_need(config: Mapping[str, Any], shape: Shape, *, on_gpu: bool) -> Need:
    """Return what one vLLM takes; on each of its GPUs, of which it fills what it is given."""
    inference, group = config["inference"], config["inference"].get("tensor_parallel_size", 1)
    weights = float(shape.parameters * bytes_a_number(config))
    if on_gpu:
        row = row_bytes(config, shape) / group
        device = {"runtime": _CUDA_RUNTIME, "weights": weights / group, "key-values": row}
        return Need(device=device, host={"runtime": _CUDA_HOST})
    runtime = _RUNTIME + (_PER_WORKER * group if group > 1 else 0)
    if transport(config) == "gloo":  # it receives them beside those that it has
        weights *= 1 + 1 / _WEIGHTS_ON_CPU
    cache = float(inference.get("cpu_kv_cache_gib") or 1) * GIB * group
    return Need(
        device={},
        host={"runtime": runtime, "weights": weights * _WEIGHTS_ON_CPU, "key-values": cache},
    )


def row_bytes(config: Mapping[str, Any], shape: Shape) -> float:
    """Keys and values of one row of max_seq_len: less than that, and vLLM does not start."""
    return float(shape.row_bytes(config["max_seq_len"], config["model"]["dtype"]))


def utilization(inference: Mapping[str, Any]) -> float:
    """The share of a GPU that vLLM takes."""
    return float(inference["args"].get("gpu_memory_utilization", _UTILIZATION))
