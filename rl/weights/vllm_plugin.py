"""Runs inside vLLM: loads weights from a file in memory and proves that it computes with them.

vLLM loads this module through the entry point group `vllm.general_plugins`. On CPU vLLM repacks
every linear weight for its kernels and empties the original, so loading into the parameters is
not enough and looking at them proves nothing. We reload layer by layer, repack what the reload
leaves behind (embedding and tied output head), and then compare what each layer computes with
what it should.
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

from rl.inference.fork import fork_engine
from rl.weights.memory_file import read_weights
from rl.weights.vllm_proof import (
    as_vllm_names,
    compared_layers,
    coverage,
    layers_that_share,
    matrices_that_differ,
)

log = init_logger(f"vllm.{__name__}")  # below vLLM's own logger, which alone has a handler there


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
        shared = list(layers_that_share(self.model, self._received))
        if shared:
            raise RuntimeError(f"weight push: vLLM computes in the trainer's memory in {shared}")
        if self.parallel_config.tensor_parallel_size == 1:
            sent = as_vllm_names(self.model, self._received)
            proof = dict(compared_layers(self.model, sent))
            _say_once(coverage(proof))
            wrong = sorted(name for name, equal in proof.items() if equal is False)
            if wrong:
                raise RuntimeError(f"weight push: vLLM computes with other weights in {wrong}")
        else:
            _say_once("no layer is compared: under tensor parallelism each holds but a shard")
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
            _say_once(f"all {len(named)} matrices of the adapter are compared with what was sent")
            if wrong:
                raise RuntimeError(f"adapter push: vLLM holds other matrices in {wrong}")
        else:
            _say_once("no matrix is compared: under tensor parallelism each layer holds a shard")

    def finish_weight_update(self) -> None:
        """Never called."""

    def shutdown(self) -> None:
        """Nothing is held open."""


@cache
def _say_once(sentence: str) -> None:
    """In vLLM's log, once and not at every step."""
    log.info("weight push: %s", sentence)
