"""How much memory a trainer rank takes at its peak, from sizes and settings alone.

    weights        a number each, in the model's dtype
    gradients      float32, of what is trained
    optimizer      master weights and moments in float32, of what is trained
    step           copies while the optimizer works
    activations    what a layer keeps of each token for the backward pass, counted by the tensors
                   that autograd saves in our layers and transformers' (coefficients below)
    logits         one chunk of them, forward or backward
    push           the weights in memory as they are sent; on rank 0

What measuring added (docs/scaling.md, benchmarks/memory.py): copies of DeepSpeed's, and on CPU what
the allocator keeps between passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.config.facts import fact, is_imitator, needs_reference, references
from rl.config.limits import value_of
from rl.config.transport import transport
from rl.model.shape import GIB, Shape, bytes_of

Bytes = dict[str, float]  # what for: how many

_RUNTIME = 0.67 * GIB  # Python, torch, DeepSpeed and their kernels: on CPU
_CUDA_RUNTIME = 1.0 * GIB  # the context and NCCL's buffers: on the GPU
_CUDA_HOST = 3.0 * GIB  # CUDA's libraries: beside it
_SHORT = 512  # tokens of a row (rl/model/loading.py)
_KEPT_ON_CPU, _KEPT_ON_GPU = 1.6, 1.15  # of the activations, with what an allocator wastes


@dataclass(frozen=True)
class _Stage:
    """Bytes a trained parameter under a ZeRO stage, in bfloat16 with float32 masters."""

    gradients: float
    step: float
    shares_gradients: bool = False  # each rank holds its part
    buffers: float = 0.0


# Measured with one rank; torch's AdamW over one flat tensor makes two more of its size.
_STAGES = {
    0: _Stage(gradients=4, step=4),
    1: _Stage(gradients=9, step=8),
    2: _Stage(gradients=4, step=12, shares_gradients=True),
    3: _Stage(gradients=4, step=12, shares_gradients=True, buffers=12),
}
_BUCKET = 5e8  # numbers: DeepSpeed's buffers grow no further


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes by what they are for: on the GPU, and in the machine's memory."""

    device: Bytes
    host: Bytes

    @property
    def on_device(self) -> float:
        """All of what lies on the GPU."""
        return sum(self.device.values())

    @property
    def on_host(self) -> float:
        """All of what lies in the machine's memory."""
        return sum(self.host.values())


def trainer_need(
    config: Mapping[str, Any], shape: Shape, *, ranks: int, first: bool, on_gpu: bool
) -> Need:
    """Return what one rank takes at its peak; the `first` one pushes the weights, too."""
    trained = trained_parameters(config, shape)
    states = _states(config, shape.parameters, trained, ranks)
    if config["critic"].get("optim"):  # a second model that is trained, with a head of one row
        critic = _states(config, shape.parameters - shape.embedding, trained, ranks)
        states = {key: value + critic[key] for key, value in states.items()}
    work = {
        "activations": _activations(config, shape, ranks, on_gpu),
        "logits": _logits(config, shape, ranks),
    }
    step = states.pop("step")
    if on_gpu:  # its allocator gives what the passes leave to the step
        work["activations"] = max(work["activations"], step - work["logits"])
    else:
        states["step"] = step
    copies = _num_references(config) * shape.parameters * bytes_a_number(config)
    compute = {**states, **work, "reference": copies}
    pushed = _pushed(config, shape) if first else 0.0
    if not on_gpu:
        spare = _drawn(config, shape) - sum(compute.values())  # a model is drawn in float32 first
        compute["activations"] += max(spare, 0.0)
        return Need(device={}, host={"runtime": _RUNTIME, **compute, "push": pushed})
    moved = _offloaded(config, compute)
    stays = {key: value - moved.get(key, 0.0) for key, value in compute.items()}
    whole = shape.parameters * bytes_a_number(config)
    on_its_way = whole if pushed else 0.0  # from the GPU to the file
    return Need(
        device={"runtime": _CUDA_RUNTIME, **stays},
        host={"runtime": _CUDA_HOST, **moved, "push": pushed + on_its_way},
    )


def trained_parameters(config: Mapping[str, Any], shape: Shape) -> int:
    """Return how many numbers the optimizer moves."""
    adapter = config["adapter"]
    if not fact(adapter["_target_"], "freezes_base", False):
        return shape.parameters
    targets, layers = adapter["target_modules"], shape.linear_layers()
    chosen = [size for name, size in layers.items() if targets == "all-linear" or name in targets]
    return shape.layers * adapter["rank"] * sum(inputs + outputs for inputs, outputs in chosen)


def bytes_a_number(config: Mapping[str, Any]) -> int:
    """Return those of a weight, as model.dtype has it."""
    return bytes_of(config["model"]["dtype"])


def _states(config: Mapping[str, Any], parameters: int, trained: int, ranks: int) -> Bytes:
    """What is there throughout the run; and what the step adds."""
    number = value_of(config, "deepspeed.zero_optimization.stage") or 0
    stage, half = _STAGES[number], bytes_a_number(config) == 2
    shares = ranks if number else 1
    of_hidden = bool(fact(config["optim"]["_target_"], "whole_matrices", False))
    moments, extra = (4, 7) if of_hidden else (8, 0)  # Muon has one moment, and works in copies
    return {
        "weights": parameters * bytes_a_number(config) / (ranks if number == 3 else 1),
        "gradients": trained * stage.gradients / (ranks if stage.shares_gradients else 1),
        "optimizer": trained * (moments + 4 * half) / shares,
        "step": trained * (stage.step + extra) / shares + min(trained, _BUCKET) * stage.buffers,
    }


def _tokens(config: Mapping[str, Any], ranks: int) -> int:
    """Padded tokens of the largest micro-batch that there can be."""
    rows = -(-config["batch_size"] // ranks)
    limit = config["trainer"]["tokens_per_micro_batch"]
    return max(min(limit, rows * config["max_seq_len"]), config["max_seq_len"])


def _activations(config: Mapping[str, Any], shape: Shape, ranks: int, on_gpu: bool) -> float:
    """Bytes that autograd keeps for the backward pass."""
    half, frozen = bytes_a_number(config) == 2, trained_parameters(config, shape) < shape.parameters
    # By number of the residual stream, the feed-forward part, queries and keys of each token.
    coefficients = {
        (True, False): (16.0, 8.0, 10.5, 10.25),
        (True, True): (12.0, 8.0, 8.5, 8.25),
        (False, False): (24.0, 16.0, 16.5, 16.25),
        (False, True): (16.0, 16.0, 12.5, 12.25),
    }[half, frozen]
    widths = (shape.hidden, shape.inner, shape.query, shape.key)
    layer = sum(c * w for c, w in zip(coefficients, widths, strict=True))
    if half and not on_gpu and config["max_seq_len"] <= _SHORT:  # attention is in float32 then
        layer += 6 * shape.query + 4 * shape.key
    if frozen:
        layer += 14 * config["adapter"]["rank"]
    kept = shape.layers * layer
    if config["trainer"]["gradient_checkpointing"]:  # a layer's input each, and one layer anew
        kept = shape.layers * shape.hidden * bytes_a_number(config) + layer
    waste = _KEPT_ON_GPU if on_gpu else _KEPT_ON_CPU
    return _tokens(config, ranks) * (kept + 8 * shape.hidden) * waste


def _logits(config: Mapping[str, Any], shape: Shape, ranks: int) -> float:
    """A chunk's logits, their gradient and what goes into it; the gradient of the head itself."""
    chunk = min(config["trainer"]["logprob_chunk"], _tokens(config, ranks))
    is_trained = trained_parameters(config, shape) == shape.parameters
    in_float32 = value_of(config, "model.head_dtype") is not None
    return 14.0 * chunk * shape.vocab + 4.0 * shape.embedding * (is_trained + in_float32)


def _num_references(config: Mapping[str, Any]) -> int:
    """Models on every rank beside the policy, as large as it as far as anybody knows."""
    if not needs_reference(config):
        return 0
    of_adapter = fact(config["adapter"]["_target_"], "freezes_base", False)
    nodes = references(config).values()
    return sum("path" in node or ("url" not in node and not of_adapter) for node in nodes)


def _pushed(config: Mapping[str, Any], shape: Shape) -> float:
    """What is sent, in memory; weights with an adapter are merged into a copy before."""
    if is_imitator(config["sampler"]["_target_"]):
        return 0.0
    trained = trained_parameters(config, shape)
    whole, way = float(shape.parameters * bytes_a_number(config)), transport(config)
    if way == "adapter":
        return float(trained * bytes_a_number(config))
    merged = whole if trained < shape.parameters else 0.0
    return merged + (0.0 if way == "disk" else whole)


def _drawn(config: Mapping[str, Any], shape: Shape) -> float:
    """A model that is initialised here is drawn in float32."""
    drawn = fact(config["model"]["_target_"], "drawn_by_trainer", False)
    return 4.0 * shape.parameters if drawn else 0.0


def _offloaded(config: Mapping[str, Any], compute: Bytes) -> Bytes:
    """What lies in the machine's memory instead (conf/deepspeed/zero3_offload*.yaml)."""
    zero = "deepspeed.zero_optimization"
    moved: Bytes = {}
    for key, parts in (
        ("offload_optimizer", ("optimizer", "gradients")),
        ("offload_param", ("weights",)),
    ):
        if value_of(config, f"{zero}.{key}.device") == "cpu":
            moved |= {part: compute[part] for part in parts}
    return moved
