"""The interface of a transport: a Sender in the trainer and a Reader in every worker of vLLM.

    trainer, rank 0                              worker of vLLM (rl/weights/vllm_plugin.py)
    Sender.collect, pack     once per push
    Sender.connect           once per replica    Reader(worker, **arguments)
    Sender.send              once per push and replica, in one thread per replica
                             ---- source --->    Reader.read(fingerprint, **source)

A new transport is one file with both classes and one YAML in conf/sync whose `_target_` is the
Sender. Neither class imports vLLM. The plugin loads and verifies the weights that a Reader returns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from rl.inference.routes import VLLMRoutes
from rl.weights.memory_file import MemoryFile

if TYPE_CHECKING:
    from rl.learner.policy import Policy

Weights = Mapping[str, torch.Tensor]


class Reader:
    """The receiver in one vLLM worker. The plugin creates it as Reader(worker, **arguments)."""

    def read(self, *fingerprint: Any, **source: Any) -> dict[str, torch.Tensor]:
        """Return the weights of one push. `source` is the dict that `Sender.source` returned.

        Raise RuntimeError if the received weights do not have this fingerprint.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release files and connections of the reader."""


def open_reader(target: str, worker: int, arguments: dict[str, Any]) -> Reader:
    """Create a reader of the class with the import path `target`, for example my_module.Mine."""
    module, _, name = target.rpartition(".")
    reader = getattr(import_module(module), name)
    # A request to vLLM's route must not be able to call an arbitrary function.
    if not (isinstance(reader, type) and issubclass(reader, Reader)):
        raise RuntimeError(f"{target} cannot receive weights: derive it from {__name__}.Reader")
    made: Any = reader
    return made(worker, **arguments)


@dataclass(kw_only=True)
class Sender:
    """The base class of senders (conf/sync). It pushes all weights through a memory file.

    All ranks call `open` and `collect`. Only rank 0 calls the other methods. Class variables except
    `reader` must be literals, because rl/config reads the source code and does not import it.
    """

    reader: ClassVar[type[Reader]]
    is_placeholder: ClassVar[bool] = False  # whether rl/config/transport.py replaces this sender
    adapter_only: ClassVar[bool] = False  # whether a push contains only the LoRA matrices
    one_host: ClassVar[bool] = False  # whether trainer and vLLM must share a host
    reader_copy: ClassVar[bool] = False  # whether a vLLM worker stores a second copy of the weights
    on_gpus: ClassVar[bool] = False  # whether the weights stay in the memory of GPUs
    own_gpus: ClassVar[bool] = False  # whether vLLM and trainer need separate GPUs

    probe_every: NonNegativeInt
    probe_rows: PositiveInt
    max_mismatch: PositiveFloat

    def open(self, timeout: float) -> None:
        """Create the memory file. `timeout`: limit in s of every wait (trainer.wait_timeout)."""
        self._timeout, self._file, self._fingerprint = timeout, MemoryFile(), ""

    def collect(self, policy: "Policy") -> Weights:
        """On rank 0, return the weights to push. All ranks must call this method.

        The next call overwrites weights that came from a GPU, so clone weights to keep them.
        """
        return policy.weights(self._file.views)

    def pack(self, weights: Weights) -> str:
        """Write the weights into the memory file for all replicas. Return their fingerprint."""
        self._fingerprint = self._file.write(weights)
        return self._fingerprint

    def connect(self, vllm: VLLMRoutes) -> None:
        """Create a reader in every worker of a newly started vLLM."""
        self.open_readers(vllm, {})

    def open_readers(self, vllm: VLLMRoutes, arguments: dict[str, Any]) -> None:
        """Make every worker of this vLLM create a reader as Reader(worker, **arguments)."""
        target = f"{self.reader.__module__}.{self.reader.__qualname__}"
        vllm.init_transfer({"reader": target, "arguments": arguments})

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:  # noqa: ARG002 AdapterSender uses it
        """Return the arguments with which the readers of this vLLM find the packed weights."""
        return {"path": self._file.path}

    def push_info(self, vllm: VLLMRoutes) -> dict[str, Any]:
        return {"fingerprint": self._fingerprint, "source": self.source(vllm)}

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Make a paused vLLM load the packed weights and sample with them as policy `version`."""
        vllm.start_update()
        vllm.update(self.push_info(vllm))
        vllm.finish_update(version)


@dataclass(kw_only=True)
class AutoSender(Sender):
    """The placeholder for sync=auto. rl/config/transport.py replaces it by another Sender."""

    is_placeholder: ClassVar[bool] = True
