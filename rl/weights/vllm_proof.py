"""Verify for the plugin (vllm_plugin.py) that vLLM computes with exactly the pushed weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    convert_to_unquantized_kernel_format,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

Weights = Mapping[str, torch.Tensor]
_UNQUANTISED = (torch.float32, torch.bfloat16, torch.float16)
_PROBES = 8  # number of random test inputs; there are as many one-hot test inputs
_MAX_NAMES = 8  # maximum number of parameter names in one log line


def as_vllm_names(model: torch.nn.Module, weights: Weights) -> Weights:
    """Return the weights under vLLM's names. q, k and v stay separate, although vLLM fuses them."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper().apply_dict(dict(weights)) if mapper else weights


def compare_parameters(
    model: torch.nn.Module, weights: Weights
) -> Iterator[tuple[str, bool | None]]:
    """Yield each parameter's name, and whether vLLM computes with exactly its value in `weights`.

    Yield None if no comparison is possible, for example if the parameter is quantised or not sent.
    vLLM fuses layers, for example q, k and v. The model's `packed_modules_mapping` lists them.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    first_names: dict[int, str] = {}  # id(parameter) -> first of its names, the one that is sent
    for owner, layer in model.named_modules():
        if isinstance(getattr(layer, "w13_weight", None), torch.nn.Parameter):
            yield from _compare_experts(owner, layer, weights)
            continue
        for leaf, value in layer.named_parameters(recurse=False):
            name = f"{owner}.{leaf}".lstrip(".")
            sent = _find_sent(first_names.setdefault(id(value), name), packed, weights)
            if sent is None or value.dtype not in _UNQUANTISED:
                yield name, None
            else:
                yield name, _is_equal(layer, leaf, value, sent.to(value))


def _find_sent(name: str, packed: Mapping[str, list[str]], weights: Weights) -> torch.Tensor | None:
    owner, _, leaf = name.rpartition(".")
    prefix, _, last = owner.rpartition(".")
    sources = [f"{prefix}.{source}.{leaf}".lstrip(".") for source in packed.get(last, [last])]
    found = [weights[source] for source in sources if source in weights]
    return _stack_rows(found) if len(found) == len(sources) else None


def _is_equal(layer: Any, leaf: str, value: torch.Tensor, sent: torch.Tensor) -> bool | None:
    # Ignore rows beyond those of `sent`, which pad the vocabulary. A repacked layer has no rows.
    can_be_read = value.shape[1:] == sent.shape[1:] and len(value) >= len(sent)
    equal = torch.equal(value[: len(sent)], sent) if can_be_read else None
    if equal is not False and leaf == "weight" and hasattr(layer, "cpu_linear"):
        equal = computes_with(layer, sent)
    return equal


def _compare_experts(owner: str, layer: Any, weights: Weights) -> Iterator[tuple[str, bool | None]]:
    prefix = owner.removesuffix(".routed_experts")
    sent = [weights.get(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj")]
    is_known = sent[0] is not None and sent[1] is not None
    is_plain = layer.w13_weight.dtype in _UNQUANTISED
    expected = _kernel_weights(layer, *sent) if is_known and is_plain else {}
    for leaf, value in layer.named_parameters(recurse=False):
        equal = torch.equal(value, expected[leaf]) if leaf in expected else None
        yield f"{owner}.{leaf}", equal


def _kernel_weights(layer: Any, w13: Any, w2: Any) -> dict[str, torch.Tensor]:
    # Copy the weights, because the conversion for some kernels changes them in place.
    w13, w2 = (tensor.to(layer.w13_weight, copy=True) for tensor in (w13, w2))
    method, twin = layer.quant_method, torch.nn.Module()
    w13, w2 = convert_to_unquantized_kernel_format(
        method.unquantized_backend, layer.moe_config, w13, w2, layer
    )
    twin.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
    twin.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
    method.moe_kernel.fused_experts.process_weights_after_loading(twin)
    return dict(twin.named_parameters())


def parameters_sharing_memory(model: torch.nn.Module, weights: Weights) -> Iterator[str]:
    used = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.untyped_storage().data_ptr() in used:
            yield name


def coverage_line(results: Mapping[str, bool | None]) -> str:
    """Return a log line that counts the compared parameters. `results`: of `compare_parameters`."""
    num, unknown = len(results), [name for name, equal in results.items() if equal is None]
    text = f"{num - len(unknown)} of {num} parameters are compared with what was sent"
    if not unknown:
        return text
    shown = ", ".join(unknown[:_MAX_NAMES]) + (", ..." if len(unknown) > _MAX_NAMES else "")
    return f"{text}; not compared: {shown}"


def computes_with(layer: Any, weight: torch.Tensor) -> bool:
    """Return whether the layer computes with `weight`, even if the layer's weights are repacked.

    Repack `weight` for the same kernel, and require equal outputs for all `probe_inputs`. Another
    kernel would need a tolerance, which would hide the change of one training step.
    """
    probe = probe_inputs(weight.shape[1]).to(weight)  # [inputs, in]
    bias = getattr(layer, "bias", None)
    computed = layer.cpu_linear(probe, layer.weight, bias)  # [inputs, out with padding]
    missing = computed.shape[1] - len(weight)
    padded = _stack_rows([weight] + [weight.new_zeros(missing, weight.shape[1])] * (missing > 0))
    twin: Any = torch.nn.Module()
    twin.weight = torch.nn.Parameter(padded, requires_grad=False)
    dispatch_cpu_unquantized_gemm(twin, remove_weight=False)
    expected = twin.cpu_linear(probe, twin.weight, bias)
    return torch.equal(computed[:, : len(weight)], expected[:, : len(weight)])


def _stack_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along axis 0. Do not copy a lone tensor, because it may be a gigabyte."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def probe_inputs(width: int) -> torch.Tensor:
    """Return fixed inputs [inputs, width]: noise, and one-hot vectors spread over the width."""
    noise = torch.randn(_PROBES, width, generator=torch.Generator().manual_seed(0))
    columns = torch.linspace(0, width - 1, _PROBES).long()
    return torch.cat([noise, torch.nn.functional.one_hot(columns, width).float()])


def adapted_layers_that_differ(
    manager: LoRAModelManager,
    slot: int,
    sent: Mapping[tuple[str, bool], torch.Tensor],
    form: PEFTHelper,
) -> Iterator[str]:
    """Yield the layers whose adapter matrices in vLLM are missing or differ from the sent ones.

    A key of `sent` is (layer name, True for matrix A or False for matrix B).
    """
    in_vllm: dict[tuple[str, bool], torch.Tensor] = {}
    for name, layer in manager.modules.items():
        for i, source in enumerate(manager.packed_modules.get(name, [name])):
            for is_a, stacks in ((True, "lora_a_stacked"), (False, "lora_b_stacked")):
                stacked = getattr(layer, stacks)
                matrices = stacked[i] if isinstance(stacked, tuple) else stacked
                in_vllm[source, is_a] = matrices[slot, 0]
    for (name, is_a), tensor in sent.items():
        matrix = in_vllm.get((name, is_a))
        if matrix is None:
            yield name
            continue
        expected = tensor.to(matrix) * (1 if is_a else form.get_rank_and_scaling(name)[1])
        # vLLM's matrices have the size of the largest allowed adapter, padded at the end.
        rows, columns = expected.shape
        if not torch.equal(matrix[:rows, :columns], expected):
            yield name
