"""Runs inside vLLM: load the weights of a push and prove that vLLM computes with them.

vLLM imports this module through the entry point group `vllm.general_plugins`. On CPU vLLM repacks
every linear weight for its kernels and empties the original. So loading into the parameters is not
enough, and reading them proves nothing. This plugin reloads layer by layer, repacks what the reload
skips (embedding and tied output head), and compares the output of each layer with the output that
the received weights give. A Reader (rl/weights/transport.py) brings the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rl.inference.quick_start import start_quickly
from rl.weights.transport import Reader, Weights, open_reader
from rl.weights.vllm_proof import (
    as_vllm_names,
    compared_layers,
    coverage,
    layers_that_share,
    matrices_that_differ,
)

log = init_logger(f"vllm.{__name__}")  # only vLLM's own logger has a handler in this process


def register() -> None:
    """Register our transfer engines; vLLM calls this in each of its processes."""
    start_quickly()
    WeightTransferEngineFactory.register_engine("whole", WholeWeightsEngine)
    WeightTransferEngineFactory.register_engine("adapter", AdapterEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The class of the reader, and the arguments that its sender gives it."""

    reader: str
    facts: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One push: the fingerprint of its weights and where the reader finds them."""

    fingerprint: str
    source: dict[str, Any]


class _Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Opens the reader that the trainer names.

    Raises:
        RuntimeError: the weights are not those that the trainer wrote, or a layer does not compute
            with them. vLLM answers the trainer's request with it, so the push fails in its step.

    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _reader: Reader | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the reader, and close that of a trainer before a restart."""
        self.shutdown()
        self._reader = open_reader(init_info.reader, self.parallel_config.rank, init_info.facts)

    def start_weight_update(self) -> None:
        """Change nothing yet: if no weights follow, the model must stay as it is."""

    def shutdown(self) -> None:
        """Close the reader."""
        if self._reader:
            self._reader.close()
            self._reader = None

    def read(self, update_info: UpdateInfo) -> dict[str, torch.Tensor]:
        """Return the weights of a push."""
        assert self._reader
        return self._reader.read(update_info.fingerprint, **update_info.source)


class WholeWeightsEngine(_Engine):
    """Loads all weights of a push, under Hugging Face names."""

    _received: Weights = {}  # noqa: RUF012 replaced, never changed

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read and check the weights, then pass them to the model's own loader."""
        # Kept until `finish_weight_update` has compared every layer with them.
        self._received = self.read(update_info)
        # Restores the original shapes of the parameters, so that they can be loaded.
        initialize_layerwise_reload(self.model)
        load = cast("Callable[..., object]", self.model.load_weights)
        load(list(self._received.items()))

    def finish_weight_update(self) -> None:
        """Repack for the CPU kernels and compare every layer with the weights received.

        Does nothing if none were received: a new trainer finishes what the last one left open.
        """
        if not self._received:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            # A repacked layer has lost its original, so a layer that has one was skipped.
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel() > 0:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        shared = list(layers_that_share(self.model, self._received))
        if shared:
            raise RuntimeError(f"weight push: vLLM computes in the trainer's memory in {shared}")
        if self.parallel_config.tensor_parallel_size == 1:
            sent = as_vllm_names(self.model, self._received)
            proof = dict(compared_layers(self.model, sent))
            _log_once(coverage(proof))
            wrong = sorted(name for name, equal in proof.items() if equal is False)
            if wrong:
                raise RuntimeError(f"weight push: vLLM computes with other weights in {wrong}")
        else:
            _log_once("no layer is compared: under tensor parallelism each holds but a shard")
        self._received = {}  # unmaps them


class AdapterEngine(_Engine):
    """Replaces the one adapter that vLLM has loaded by another of the same form."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the reader, which writes the folder from which vLLM loads the adapter once."""
        super().init_transfer_engine(init_info)
        self._form = PEFTHelper.from_dict(init_info.facts["form"])

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Replace the matrices of the adapter and compare them with those received."""
        received = self.read(update_info)
        manager = cast("LoRAModelManager", self.model.lora_manager)
        names = getattr(self.model, "hf_to_vllm_mapper", None)
        names = names.get_rename_mapper() if names else None
        (old,) = manager.list_adapters().values()
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=old.id,
            # Clones, because vLLM scales them in place.
            tensors={name: tensor.clone() for name, tensor in received.items()},
            peft_helper=self._form,
            device="cpu",
            dtype=cast("torch.dtype", manager.lora_config.lora_dtype),
            weights_mapper=names,
        )
        # Under the old id, so that running requests continue.
        manager.remove_adapter(old.id)
        manager.add_adapter(lora)
        manager.activate_adapter(old.id)
        if self.parallel_config.tensor_parallel_size == 1:
            named = {parse_fine_tuned_lora_name(n, names): t for n, t in received.items()}
            slot = manager.lora_index_to_id.index(old.id)
            wrong = list(matrices_that_differ(manager, slot, named, self._form))
            _log_once(f"all {len(named)} matrices of the adapter are compared with what was sent")
            if wrong:
                raise RuntimeError(f"adapter push: vLLM holds other matrices in {wrong}")
        else:
            _log_once("no matrix is compared: under tensor parallelism each layer holds a shard")

    def finish_weight_update(self) -> None:
        """Do nothing: an update is finished only to drop the adapters of a trainer before."""


@cache
def _log_once(text: str) -> None:
    """Write a line to vLLM's log, once instead of at every step."""
    log.info("weight push: %s", text)
