"""Runs inside vLLM: loads weights from a file in memory and proves that it computes with them.

vLLM loads this module through the entry point group `vllm.general_plugins`. On CPU vLLM repacks
every linear weight for its kernels and empties the original, so loading into the parameters is
not enough and looking at them proves nothing. We reload layer by layer, repack what the reload
leaves behind (embedding and tied output head), and then compare what each layer computes with
what it should.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rl.inference.fork import fork_engine
from rl.weights.memory_file import read_weights

Weights = Mapping[str, torch.Tensor]
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # not quantised
_PROBES = 8  # of each kind


def register() -> None:
    """Entry point: make our transfer engines known; vLLM calls this in each of its processes."""
    fork_engine()
    WeightTransferEngineFactory.register_engine("shm", ShmWeightTransferEngine)
    WeightTransferEngineFactory.register_engine("adapter", AdapterTransferEngine)


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand: each update names its file."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One push: where the weights lie and what they must add up to."""

    path: str
    fingerprint: str


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads a safetensors file in Hugging Face naming, all weights at once.

    Raises:
        RuntimeError: the file is not what the trainer wrote, or a layer does not compute with it;
            vLLM answers the trainer's request with it, so the push fails in the same step.

    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Give the parameters their original shapes back, so that they can be loaded."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Read the file, check it, hand it to the model's own loader."""
        # Kept until `finish_weight_update` has compared every layer with it.
        self._received = read_weights(update_info.path, update_info.fingerprint)
        load = cast("Callable[..., object]", self.model.load_weights)
        load(list(self._received.items()))

    def finish_weight_update(self) -> None:
        """Repack for the CPU kernels and check every layer against the weights received."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            # What the reload repacked has lost its original; whoever still has one was left out.
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel() > 0:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        if self.parallel_config.tensor_parallel_size == 1:  # else a layer holds but a shard
            wrong = sorted(layers_that_differ(self.model, self._received))
            if wrong:
                raise RuntimeError(f"weight push: vLLM computes with other weights in {wrong}")
        self._received = {}  # unmaps the file

    def shutdown(self) -> None:
        """Nothing is held open."""


@dataclass
class AdapterInitInfo(WeightTransferInitInfo):
    """What adapter_config.json holds."""

    config: dict[str, Any]


class AdapterTransferEngine(WeightTransferEngine[AdapterInitInfo, ShmUpdateInfo]):
    """Replaces the one adapter that vLLM has loaded by another of the same form.

    Raises:
        RuntimeError: as above; here the matrices themselves can be looked at.

    """

    init_info_cls = AdapterInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: AdapterInitInfo) -> None:
        """Keep the form of all adapters to come."""
        self._form = PEFTHelper.from_dict(init_info.config)

    def start_weight_update(self) -> None:
        """Nothing to do: one update lasts as long as the run (rl/weights/pusher.py says why)."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Read the file, check it, put its matrices where the old ones were, look at them."""
        received = read_weights(update_info.path, update_info.fingerprint)
        manager = cast("LoRAModelManager", self.model.lora_manager)
        names = getattr(self.model, "hf_to_vllm_mapper", None)
        names = names.get_rename_mapper() if names else None
        (old,) = manager.list_adapters().values()
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=old.id,
            tensors={name: tensor.clone() for name, tensor in received.items()},  # it scales them
            peft_helper=self._form,
            device="cpu",
            dtype=cast("torch.dtype", manager.lora_config.lora_dtype),
            weights_mapper=names,
        )
        # Under the old id, by which running requests go on.
        manager.remove_adapter(old.id)
        manager.add_adapter(lora)
        manager.activate_adapter(old.id)
        if self.parallel_config.tensor_parallel_size == 1:
            named = {parse_fine_tuned_lora_name(n, names): t for n, t in received.items()}
            slot = manager.lora_index_to_id.index(old.id)
            wrong = list(matrices_that_differ(manager, slot, named, self._form))
            if wrong:
                raise RuntimeError(f"adapter push: vLLM holds other matrices in {wrong}")

    def finish_weight_update(self) -> None:
        """Never called."""

    def shutdown(self) -> None:
        """Nothing is held open."""


def layers_that_differ(model: torch.nn.Module, weights: Weights) -> Iterator[str]:
    """Names of layers that hold, or on CPU compute with, anything else than `weights`, bit by bit.

    vLLM fuses layers (q, k and v into one); `packed_modules_mapping` of the model says which. A
    layer that holds another form of its weights (a shard, a quantised one) cannot be compared here.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        held = getattr(layer, "weight", None)
        if not isinstance(held, torch.Tensor) or held.dtype not in _PLAIN:
            continue
        prefix, _, leaf = name.rpartition(".")
        parts = [f"{prefix}.{part}.weight".lstrip(".") for part in packed.get(leaf, [leaf])]
        if not all(part in weights for part in parts):
            continue  # tied head: the embedding it shares is checked under its own name
        sent = torch.cat([weights[part] for part in parts]).to(held)  # [out, in] or [in]
        # More rows than were sent are the vocabulary's padding; none, a repacked layer's original.
        comparable = held.shape[1:] == sent.shape[1:] and len(held) >= len(sent)
        stale = comparable and not torch.equal(held[: len(sent)], sent)
        if stale or (hasattr(layer, "cpu_linear") and not computes_with(layer, sent)):
            yield name


def computes_with(layer: Any, weight: torch.Tensor) -> bool:
    """Whether a layer's repacked copy, which cannot be read, gives bit by bit what `weight` gives.

    A tolerance would have to allow for another kernel's rounding, which is more than one step
    changes. So the weights are repacked once more for the same kernel. Half of the inputs are
    noise, which feels every weight; the others pick single columns, so that nothing is rounded.
    """
    probe = probes(weight.shape[1]).to(weight)  # [P, in]
    bias = getattr(layer, "bias", None)
    computed = layer.cpu_linear(probe, layer.weight, bias)  # [P, out], padded for the vocabulary
    padded = torch.nn.functional.pad(weight, (0, 0, 0, computed.shape[1] - weight.shape[0]))
    twin: Any = torch.nn.Module()
    twin.weight = torch.nn.Parameter(padded, requires_grad=False)
    dispatch_cpu_unquantized_gemm(twin, remove_weight=False)
    expected = twin.cpu_linear(probe, twin.weight, bias)
    return torch.equal(computed[:, : len(weight)], expected[:, : len(weight)])


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
