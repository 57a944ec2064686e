"""Runs inside vLLM: loads the weights that a push brings and proves that it computes with them.

vLLM loads this module through the entry point group `vllm.general_plugins`. On CPU vLLM repacks
every linear weight for its kernels and empties the original, so loading into the parameters is
not enough and looking at them proves nothing. We reload layer by layer, repack what the reload
leaves behind (embedding and tied output head), and then compare what each layer computes with
what it should. How the weights come is another matter (rl/weights/transport.py).
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
from rl.weights.adapter import AdapterReader
from rl.weights.gloo import GlooReader
from rl.weights.shm import FileReader
from rl.weights.transport import Reader, Weights
from rl.weights.vllm_proof import (
    as_vllm_names,
    compared_layers,
    coverage,
    layers_that_share,
    matrices_that_differ,
)

log = init_logger(f"vllm.{__name__}")  # below vLLM's own logger, which alone has a handler there


READERS: dict[str, Callable[..., Reader]] = {
    "shm": FileReader,
    "disk": FileReader,
    "gloo": GlooReader,
}


def register() -> None:
    """Entry point: make our transfer engines known; vLLM calls this in each of its processes."""
    start_quickly()
    WeightTransferEngineFactory.register_engine("whole", WholeWeightsEngine)
    WeightTransferEngineFactory.register_engine("adapter", AdapterEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How weights will come, and what both ends must know of each other."""

    transport: str
    facts: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One push: where its weights are to be had and what they must add up to."""

    fingerprint: str
    where: dict[str, Any]


class WholeWeightsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads all weights at once, in Hugging Face naming, whichever way they come.

    Raises:
        RuntimeError: they are not what the trainer wrote, or a layer does not compute with them;
            vLLM answers the trainer's request with it, so the push fails in the same step.

    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _reader: Reader | None = None
    _received: Weights = {}  # noqa: RUF012 replaced, never changed

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open our end, once more for a trainer that was started again."""
        self.shutdown()
        reader = READERS[init_info.transport]
        self._reader = reader(self.parallel_config.rank, **init_info.facts)

    def start_weight_update(self) -> None:
        """Nothing yet: weights that never come leave the model as it is."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read the weights, check them, hand them to the model's own loader."""
        assert self._reader
        # Kept until `finish_weight_update` has compared every layer with it.
        self._received = self._reader.read(update_info.fingerprint, **update_info.where)
        # Gives the parameters their original shapes back, so that they can be loaded.
        initialize_layerwise_reload(self.model)
        load = cast("Callable[..., object]", self.model.load_weights)
        load(list(self._received.items()))

    def finish_weight_update(self) -> None:
        """Repack for the CPU kernels and check every layer against the weights received.

        Without any, a trainer gives up what one before it has left open.
        """
        if not self._received:
            return
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
        self._received = {}  # unmaps them

    def shutdown(self) -> None:
        """Close our end."""
        if self._reader:
            self._reader.close()
            self._reader = None


class AdapterEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replaces the one adapter that vLLM has loaded by another of the same form.

    Raises:
        RuntimeError: as above; here the matrices themselves can be looked at.

    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Have the adapter in a folder from which vLLM loads it, once."""
        self._reader = AdapterReader(self.parallel_config.rank, **init_info.facts)
        self._form = PEFTHelper.from_dict(self._reader.form)

    def start_weight_update(self) -> None:
        """Nothing: one update lasts as long as the run (rl/weights/adapter.py)."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Read the matrices, put them where the old ones were, look at them."""
        received = self._reader.read(update_info.fingerprint, **update_info.where)
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
        """Nothing to do; vLLM drops all adapters, so only a trainer that begins anew asks."""

    def shutdown(self) -> None:
        """Nothing is held open."""


@cache
def _say_once(sentence: str) -> None:
    """In vLLM's log, once and not at every step."""
    log.info("weight push: %s", sentence)
