"""What vLLM computes with, compared bit by bit with what was sent (rl/weights/vllm_plugin.py)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

Weights = Mapping[str, torch.Tensor]
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # not quantised
_PROBES = 8  # of each kind
_MOST_NAMED = 8  # layers in a line of the log


def as_vllm_names(model: torch.nn.Module, weights: Weights) -> Weights:
    """The same tensors, named as vLLM's modules are; q, k and v stay apart."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper().apply_dict(dict(weights)) if mapper else weights


def compared_layers(model: torch.nn.Module, weights: Weights) -> Iterator[tuple[str, bool | None]]:
    """Each layer that holds weights, and whether it computes with `weights`, bit by bit.

    None where that cannot be known: it holds another form of them (a shard, a quantised one), or
    they were sent under a name that is not its own. vLLM fuses layers (q, k and v into one);
    `packed_modules_mapping` of the model says which.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        held = getattr(layer, "weight", None)
        if not isinstance(held, torch.Tensor):
            continue
        prefix, _, leaf = name.rpartition(".")
        parts = [f"{prefix}.{part}.weight".lstrip(".") for part in packed.get(leaf, [leaf])]
        if held.dtype not in _PLAIN or not all(part in weights for part in parts):
            yield name, None
            continue
        sent = _joined([weights[part] for part in parts]).to(held)  # [out, in] or [in]
        # More rows than were sent are the vocabulary's padding; none, a repacked layer's original.
        can_be_read = held.shape[1:] == sent.shape[1:] and len(held) >= len(sent)
        equal = torch.equal(held[: len(sent)], sent) if can_be_read else None
        if equal is not False and hasattr(layer, "cpu_linear"):
            equal = computes_with(layer, sent)
        yield name, equal


def layers_that_share(model: torch.nn.Module, weights: Weights) -> Iterator[str]:
    """Names of parameters that lie in the memory of `weights`, which the next push writes over."""
    places = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.untyped_storage().data_ptr() in places:
            yield name


def coverage(proof: Mapping[str, bool | None]) -> str:
    """How much of a model the proof looks at, in a sentence."""
    unknown = [name for name, equal in proof.items() if equal is None]
    text = f"{len(proof) - len(unknown)} of {len(proof)} layers are compared with what was sent"
    if not unknown:
        return text
    shown = ", ".join(unknown[:_MOST_NAMED]) + (", ..." if len(unknown) > _MOST_NAMED else "")
    return f"{text}; nothing is known of {shown}"


def computes_with(layer: Any, weight: torch.Tensor) -> bool:
    """Whether a layer's repacked copy, which cannot be read, gives bit by bit what `weight` gives.

    A tolerance would have to allow for another kernel's rounding, which is more than one step
    changes. So the weights are repacked once more for the same kernel. Half of the inputs are
    noise, which feels every weight; the others pick single columns, so that nothing is rounded.
    """
    probe = probes(weight.shape[1]).to(weight)  # [P, in]
    bias = getattr(layer, "bias", None)
    computed = layer.cpu_linear(probe, layer.weight, bias)  # [P, out], padded for the vocabulary
    missing = computed.shape[1] - len(weight)
    padded = _joined([weight] + [weight.new_zeros(missing, weight.shape[1])] * (missing > 0))
    twin: Any = torch.nn.Module()
    twin.weight = torch.nn.Parameter(padded, requires_grad=False)
    dispatch_cpu_unquantized_gemm(twin, remove_weight=False)
    expected = twin.cpu_linear(probe, twin.weight, bias)
    return torch.equal(computed[:, : len(weight)], expected[:, : len(weight)])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts below one another; a single one is not copied, for it may be a gigabyte."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def probes(width: int) -> torch.Tensor:
    """Fixed inputs [P, width]: noise, and single columns spread over the width."""
    noise = torch.randn(_PROBES, width, generator=torch.Generator().manual_seed(0))
    columns = torch.linspace(0, width - 1, _PROBES).long()
    return torch.cat([noise, torch.nn.functional.one_hot(columns, width).float()])


def matrices_that_differ(
    manager: LoRAModelManager,
    slot: int,
    sent: Mapping[tuple[str, bool], torch.Tensor],
    form: PEFTHelper,
) -> Iterator[str]:
    """Names of adapted layers for which vLLM holds other matrices than were sent, or none.

    `sent` by name and whether it is A. vLLM fuses layers, and multiplies B by the scale.
    """
    held: dict[tuple[str, bool], torch.Tensor] = {}
    for name, layer in manager.modules.items():
        for i, part in enumerate(manager.packed_modules.get(name, [name])):
            for is_a, stacks in ((True, "lora_a_stacked"), (False, "lora_b_stacked")):
                stacked = getattr(layer, stacks)
                held[part, is_a] = (stacked[i] if isinstance(stacked, tuple) else stacked)[slot, 0]
    for (name, is_a), tensor in sent.items():
        matrix = held.get((name, is_a))
        if matrix is None:
            yield name
            continue
        expected = tensor.to(matrix) * (1 if is_a else form.get_rank_and_scaling(name)[1])
        # vLLM's are as large as the largest adapter it has room for; the rest is padding.
        rows, columns = expected.shape
        if not torch.equal(matrix[:rows, :columns], expected):
            yield name
