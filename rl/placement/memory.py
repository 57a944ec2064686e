"""Estimate the peak memory of each process from the model's sizes and the run's options.

    weights        one number per parameter, in the model's dtype
    gradients      float32, of the trained parameters
    optimizer      master weights and moments in float32, of the trained parameters
    step           temporary copies that the optimizer makes during its step
    activations    tensors that autograd saves per token for the backward pass
    logits         logits of a chunk of tokens and their gradient; the head's gradient and copy
    push           the weights that rank 0 sends to vLLM; in vLLM, copies of a layer or all weights
    key-values     vLLM's cache of keys and values

Measured factors (docs/scaling.md) account for DeepSpeed's and the CPU allocator's own memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.config.facts import fact, needs_reference, references
from rl.config.limits import value_of
from rl.config.schema import Run
from rl.model.shape import GIB, Shape, bytes_of

Bytes = dict[str, float]  # purpose -> bytes

_RUNTIME = 0.67 * GIB  # host memory of a rank on a CPU: Python, torch, DeepSpeed
_CUDA_RUNTIME = 1.0 * GIB  # GPU memory of a rank: CUDA context and NCCL buffers
_CUDA_HOST = 3.0 * GIB  # host memory of a rank on a GPU: CUDA's libraries
_FLOAT32_ATTENTION_LEN = 512  # maximum row length with float32 attention (rl/model/loading.py)
_ALLOCATED_ON_CPU, _ALLOCATED_ON_GPU = 1.6, 1.15  # allocated bytes per byte of activations
# Keys are (base frozen, shared prefixes). Values are the activations of compiled layers divided by
# those of plain layers, measured on a GPU (docs/cuda.md) or, with shared prefixes, estimated.
_COMPILED = {(True, False): 0.62, (False, False): 0.45, (True, True): 0.7, (False, True): 0.56}

_VLLM_RUNTIME = 1.2 * GIB  # host memory of vLLM's API server and engine on a CPU
_VLLM_PER_WORKER = 0.6 * GIB  # host memory of each tensor-parallel worker on a CPU
_VLLM_WEIGHTS_ON_CPU = 1.3  # memory per byte of weights, because a push leaves repacked copies
_VLLM_CUDA_RUNTIME = 1.5 * GIB  # GPU memory: CUDA context, CUDA graphs, largest forward pass
_VLLM_CUDA_HOST = 4.0 * GIB  # host memory of vLLM on a GPU
_VLLM_UTILIZATION = 0.92  # vLLM 0.32's default fraction of a GPU's memory


@dataclass(frozen=True)
class _Stage:
    """Bytes per trained parameter in a ZeRO stage, for bfloat16 with float32 master weights."""

    gradients: float
    step: float  # temporary copies during the optimizer step
    shares_gradients: bool = False  # whether each rank stores only its share of the gradients
    buffers: float = 0.0  # bytes per element of DeepSpeed's buffers (at most _BUCKET elements)


# All numbers were measured with one rank. From stage 1 on, `step` includes two weight copies.
_STAGES = {
    0: _Stage(gradients=4, step=4),
    1: _Stage(gradients=9, step=8),
    2: _Stage(gradients=4, step=12, shares_gradients=True),
    3: _Stage(gradients=4, step=12, shares_gradients=True, buffers=12),
}
_BUCKET = 5e8  # number of elements in DeepSpeed's largest buffer


@dataclass(frozen=True, kw_only=True)
class Need:
    """The estimated memory of one process."""

    device: Bytes  # on each of its GPUs
    host: Bytes

    @property
    def on_device(self) -> float:
        return sum(self.device.values())

    @property
    def on_host(self) -> float:
        return sum(self.host.values())


def trainer_need(run: Run, shape: Shape, *, ranks: int, first: bool, on_gpu: bool) -> Need:
    """Return the peak memory of one trainer rank. Rank 0 (`first`) also pushes the weights."""
    trained = trained_parameters(run, shape)
    states = _state_bytes(run, shape.parameters, trained, ranks)
    if run.critic.get("optim"):  # the critic is a second trained model, with a head of one output
        critic = _state_bytes(run, shape.parameters - shape.embedding, trained, ranks)
        states = {key: value + critic[key] for key, value in states.items()}
    work = {
        "activations": _activation_bytes(run, shape, ranks, on_gpu),
        "logits": _logit_bytes(run, shape, ranks, on_gpu),
    }
    step = states.pop("step")
    if on_gpu and not _is_on_host(run, "offload_optimizer"):
        # The optimizer step reuses the memory of the forward and backward passes.
        work = work if sum(work.values()) > step else {"step": step}
    else:
        states["step"] = step
    copies = _num_references(run) * shape.parameters * bytes_per_number(run)
    compute = {**states, **work, "reference": copies}
    pushed = _push_bytes(run, shape) if first else 0.0
    if not on_gpu:
        # A new model is initialised in float32 at the start and then converted to its dtype.
        initialised = 4.0 * shape.parameters if run.model.drawn_by_trainer else 0.0
        compute["activations"] += max(initialised - sum(compute.values()), 0.0)
        return Need(device={}, host={"runtime": _RUNTIME, **compute, "push": pushed})
    moved = _offloaded_bytes(run, compute)
    stays = {key: value - moved.get(key, 0.0) for key, value in compute.items()}
    whole = float(shape.parameters * bytes_per_number(run))
    host = {"runtime": _CUDA_HOST, **moved, "push": pushed + whole if pushed else 0.0}
    # At the start every rank loads the whole model into host memory.
    host["loading"] = max(whole + _CUDA_HOST - sum(host.values()), 0.0)
    if pushed and run.transport.has("on_gpus"):
        stays["push"] = whole
    return Need(device={"runtime": _CUDA_RUNTIME, **stays}, host=host)


def vllm_need(run: Run, shape: Shape, *, on_gpu: bool) -> Need:
    """Return the minimum memory of one vLLM replica, on each of its GPUs and on its host."""
    group = run.inference.tensor_parallel_size
    weights = float(shape.parameters * bytes_per_number(run))
    if on_gpu:
        row = shape.row_cache_bytes(run.max_seq_len, run.model.dtype) / group  # a cache for one row
        # A push loads a new copy of a layer beside the one in use. vllm_proof.py adds a third copy.
        copies = 2.0 * shape.largest_weight * bytes_per_number(run) / group
        push = 0.0 if run.pushes_adapter else copies
        if run.transport.has("on_gpus") and run.transport.has("reader_copy"):
            push += weights  # each worker receives all weights
        device = {"runtime": _VLLM_CUDA_RUNTIME, "weights": weights / group, "key-values": row}
        device["push"] = push
        return Need(device=device, host={"runtime": _VLLM_CUDA_HOST})
    runtime = _VLLM_RUNTIME + (_VLLM_PER_WORKER * group if group > 1 else 0)
    if run.transport.has("reader_copy"):  # vLLM keeps the received weights beside its own
        weights *= 1 + 1 / _VLLM_WEIGHTS_ON_CPU
    cache = float(run.inference.cpu_kv_cache_gib or 1) * GIB * group
    return Need(
        device={},
        host={"runtime": runtime, "weights": weights * _VLLM_WEIGHTS_ON_CPU, "key-values": cache},
    )


def gpu_utilization(args: Mapping[str, Any] | None, default: float = _VLLM_UTILIZATION) -> float:
    return float((args or {}).get("gpu_memory_utilization", default))


def trained_parameters(run: Run, shape: Shape) -> int:
    """Return the number of parameters that are trained: all, or those of the adapter.

    An adapter has LoRA matrices, and whole copies of the modules in `modules_to_save`.
    """
    if not run.adapter.freezes_base:
        return shape.parameters
    targets, layers = run.adapter.target_modules, shape.linear_layers()
    chosen = [size for name, size in layers.items() if targets == "all-linear" or name in targets]
    matrices = run.adapter.rank * sum(inputs + outputs for inputs, outputs in chosen)
    saved = {name.rpartition(".")[2] for name in run.adapter.modules_to_save}
    matrices += sum(layers[name][0] * layers[name][1] for name in saved & {*layers})
    return shape.layers * matrices + shape.embedding * len(saved & {"embed_tokens", "lm_head"})


def bytes_per_number(run: Run) -> int:
    return bytes_of(run.model.dtype)


def _state_bytes(run: Run, parameters: int, trained: int, ranks: int) -> Bytes:
    number = value_of(run.deepspeed, "zero_optimization.stage") or 0
    stage, half = _STAGES[number], bytes_per_number(run) == 2
    shares = ranks if number else 1
    is_muon = bool(fact(run.optim["_target_"], "whole_matrices", False))
    moments, extra = (4, 7) if is_muon else (8, 0)  # Muon has one moment but more temporary copies
    return {
        "weights": parameters * bytes_per_number(run) / (ranks if number == 3 else 1),
        "gradients": trained * stage.gradients / (ranks if stage.shares_gradients else 1),
        "optimizer": trained * (moments + 4 * half) / shares,
        "step": trained * (stage.step + extra) / shares + min(trained, _BUCKET) * stage.buffers,
    }


def _max_micro_batch_tokens(run: Run, ranks: int) -> int:
    rows = -(-run.batch_size // ranks)
    return max(min(run.trainer.tokens_per_micro_batch, rows * run.max_seq_len), run.max_seq_len)


def _activation_bytes(run: Run, shape: Shape, ranks: int, on_gpu: bool) -> float:
    half, frozen = bytes_per_number(run) == 2, run.adapter.freezes_base
    # (half precision, base frozen) -> bytes per token, per layer and per unit of each of `widths`
    coefficients = {
        (True, False): (16.0, 8.0, 10.5, 10.25),
        (True, True): (12.0, 8.0, 8.5, 8.25),
        (False, False): (24.0, 16.0, 16.5, 16.25),
        (False, True): (16.0, 16.0, 12.5, 12.25),
    }[half, frozen]
    widths = (shape.hidden, shape.inner, shape.query, shape.key)
    layer = sum(c * w for c, w in zip(coefficients, widths, strict=True))
    if half and not on_gpu and run.max_seq_len <= _FLOAT32_ATTENTION_LEN:
        layer += 6 * shape.query + 4 * shape.key
    if frozen:
        layer += 14 * run.adapter.rank
    if _compiles(run, on_gpu) and not shape.experts:  # _COMPILED was not measured with experts
        layer *= _COMPILED[frozen, run.trainer.share_prefixes]
    kept = shape.layers * layer
    if run.trainer.gradient_checkpointing:  # autograd keeps every layer's input and one full layer
        kept = shape.layers * shape.hidden * bytes_per_number(run) + layer
    allocated = _ALLOCATED_ON_GPU if on_gpu else _ALLOCATED_ON_CPU
    return _max_micro_batch_tokens(run, ranks) * (kept + 8 * shape.hidden) * allocated


def _compiles(run: Run, on_gpu: bool) -> bool:
    return on_gpu and bytes_per_number(run) == 2 and run.compiles(on_gpu=on_gpu)


def _logit_bytes(run: Run, shape: Shape, ranks: int, on_gpu: bool) -> float:
    chunk = min(run.trainer.logprob_chunk, _max_micro_batch_tokens(run, ranks))
    is_trained, in_float32 = not run.adapter.freezes_base, run.model.head_dtype is not None
    logit = 6.0 if _compiles(run, on_gpu) and not in_float32 else 14.0
    return logit * chunk * shape.vocab + 4.0 * shape.embedding * (is_trained + in_float32)


def _num_references(run: Run) -> int:
    """Return the number of reference models per rank, each counted as large as the policy."""
    config = run.plain()
    if not needs_reference(config):
        return 0
    # With adapter=lora, reference=initial needs no copy, because the base model is that reference.
    is_copied = not run.adapter.freezes_base
    nodes = references(config).values()
    return sum("path" in node or ("url" not in node and is_copied) for node in nodes)


def _push_bytes(run: Run, shape: Shape) -> float:
    if not run.sampler.uses_vllm:
        return 0.0
    if run.pushes_adapter:
        return float(trained_parameters(run, shape) * bytes_per_number(run))
    whole = float(shape.parameters * bytes_per_number(run))
    return whole + (whole if run.adapter.freezes_base else 0.0)


def _offloaded_bytes(run: Run, by_purpose: Bytes) -> Bytes:
    moved: Bytes = {}
    for key, purposes in (
        ("offload_optimizer", ("optimizer", "gradients", "step")),
        ("offload_param", ("weights",)),
    ):
        if _is_on_host(run, key):
            moved |= {purpose: by_purpose[purpose] for purpose in purposes}
    return moved


def _is_on_host(run: Run, key: str) -> bool:
    return value_of(run.deepspeed, f"zero_optimization.{key}.device") == "cpu"
