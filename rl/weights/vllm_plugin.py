"""The vLLM plugin that loads the weights of a push and verifies that vLLM computes with them.

vLLM imports this module through the entry point group `vllm.general_plugins`. On a CPU, vLLM
computes with repacked copies of linear weights and empties the originals. So this plugin reloads
each layer, repacks the layers that the reload skips (embedding, tied output head, experts), and
compares parameters with the received weights, unless tensor parallelism splits them. A repacked
copy cannot be read, so for such a layer the plugin compares the outputs of the copy and of the
received weights. A Reader (rl/weights/transport.py) supplies the weights.
"""

import os
import sys
from collections.abc import Callable, Collection
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
from vllm.platforms import current_platform

from rl.inference.quick_start import patch_cpu_start
from rl.inference.server import STARTED_BY_RUN
from rl.weights.transport import Reader, Weights, open_reader
from rl.weights.vllm_proof import (
    adapted_layers_that_differ,
    as_vllm_names,
    compare_parameters,
    coverage_line,
    parameters_sharing_memory,
)

log = init_logger(f"vllm.{__name__}")  # in this process only vLLM's own logger has a handler
_log_once = cache(lambda text: log.info("weight push: %s", text))


def register() -> None:
    """Register our transfer engines. vLLM calls this function in each of its processes."""
    if STARTED_BY_RUN in os.environ and os.getcwd() not in sys.path:
        # A user's Reader may be in the current folder, which PYTHONSAFEPATH keeps out of sys.path.
        sys.path.append(os.getcwd())
    patch_cpu_start()
    WeightTransferEngineFactory.register_engine("whole", WholeWeightsEngine)
    WeightTransferEngineFactory.register_engine("adapter", AdapterEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The request to create a reader: the import path of its class, and its keyword arguments."""

    reader: str
    arguments: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The request of one push. It contains the arguments of `Reader.read`."""

    fingerprint: str
    source: dict[str, Any]


class _Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The base class of our transfer engines. vLLM reports their RuntimeErrors to the trainer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _reader: Reader | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Close the reader of an earlier trainer process, if there is one, and create a reader."""
        self.shutdown()
        self._reader = open_reader(init_info.reader, self.parallel_config.rank, init_info.arguments)

    def start_weight_update(self) -> None:
        """Do nothing, so that the model is unchanged if the trainer then fails to send weights."""

    def shutdown(self) -> None:
        if self._reader:
            self._reader.close()
            self._reader = None

    def read(self, update_info: UpdateInfo) -> dict[str, torch.Tensor]:
        assert self._reader
        return self._reader.read(update_info.fingerprint, **update_info.source)


class WholeWeightsEngine(_Engine):
    """The engine that loads all weights of a push, under their Hugging Face names."""

    _received: Weights = {}  # noqa: RUF012 replaced, never changed in place
    _loaded: Collection[str] = ()  # names of the parameters that the model's loader has set

    def receive_weights(self, update_info: UpdateInfo) -> None:
        # Keep the weights, because `finish_weight_update` compares parameters with them.
        self._received = self.read(update_info)
        # Restore the original shapes of the parameters, so that weights can be loaded.
        initialize_layerwise_reload(self.model)
        load = cast("Callable[..., Collection[str] | None]", self.model.load_weights)
        self._loaded = load(list(self._received.items())) or ()

    def finish_weight_update(self) -> None:
        """Finish the reload. Without tensor parallelism, compare parameters with the weights."""
        if not self._received:  # a new trainer ends the update that a killed trainer began
            return
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            # Repack the weights that the reload skipped. The reload has emptied those it repacked.
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel() > 0:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            # vLLM 0.32 repacks experts only at its start, so repack them after each reload.
            if current_platform.is_cpu() and hasattr(layer, "w13_weight"):
                method: Any = layer.quant_method
                method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        if shared := list(parameters_sharing_memory(self.model, self._received)):
            raise RuntimeError(
                f"weight push: vLLM's parameters {shared} share memory with the received weights: "
                "the model's load_weights must copy them"
            )
        if self.parallel_config.tensor_parallel_size == 1:
            found = dict(compare_parameters(self.model, as_vllm_names(self.model, self._received)))
            _log_once(coverage_line(found))
            wrong = {name for name, equal in found.items() if equal is False}
            if self._loaded:  # a parameter that is neither compared nor loaded keeps old weights
                wrong |= {name for name, equal in found.items() if equal is None} - {*self._loaded}
            if wrong:
                raise RuntimeError(
                    f"weight push: vLLM does not use the pushed weights in {sorted(wrong)}: "
                    "use another version of vLLM, or another model"
                )
        else:
            _log_once("no parameter is compared, because tensor parallelism splits parameters")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # finish reading before the trainer overwrites the weights
        self._received = {}  # free the tensors, which may be views of a memory-mapped file


class AdapterEngine(_Engine):
    """The engine that loads pushed LoRA matrices into vLLM's only adapter."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        super().init_transfer_engine(init_info)
        self._form = PEFTHelper.from_dict(init_info.arguments["form"])

    def receive_weights(self, update_info: UpdateInfo) -> None:
        received = self.read(update_info)
        manager = cast("LoRAModelManager", self.model.lora_manager)
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_rename_mapper() if mapper else None
        (old,) = manager.list_adapters().values()
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=old.id,
            # Clone the tensors, because vLLM scales them in place.
            tensors={name: tensor.clone() for name, tensor in received.items()},
            peft_helper=self._form,
            device="cpu",
            dtype=cast("torch.dtype", manager.lora_config.lora_dtype),
            weights_mapper=mapper,
        )
        # Keep the adapter's id, so that running requests continue.
        manager.remove_adapter(old.id)
        manager.add_adapter(lora)
        manager.activate_adapter(old.id)
        if self.parallel_config.tensor_parallel_size == 1:
            named = {parse_fine_tuned_lora_name(n, mapper): t for n, t in received.items()}
            slot = manager.lora_index_to_id.index(old.id)
            wrong = list(adapted_layers_that_differ(manager, slot, named, self._form))
            _log_once(f"all {len(named)} matrices of the adapter are compared with what was sent")
            if wrong:
                raise RuntimeError(
                    f"adapter push: vLLM does not use the pushed matrices in {wrong}: use sync=shm"
                )
        else:
            _log_once("no matrix is compared, because tensor parallelism splits matrices")

    def finish_weight_update(self) -> None:
        """Do nothing, because vLLM itself drops its adapters after this call.

        Only a new trainer makes this call, so that vLLM drops the adapter of an earlier trainer.
        """
