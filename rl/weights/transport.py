"""What a way for weights to travel consists of: an end in the trainer and one in each vLLM worker.

    trainer, rank 0                            each worker of vLLM (rl/weights/vllm_plugin.py)
    Sender.collect, pack      once a push
    Sender.connect            once a replica   Reader(**facts): what both must know of each other
    Sender.send               once a push and replica, each replica in a thread of its own
                              -- `where` --->  Reader.read(mark, **where): the weights, checked
    Sender.release            once a push: every replica has answered

Both ends of one way lie in one file. None knows vLLM: what is done with weights that have come is
the plugin's affair, and the same for all ways.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl.inference.routes import VLLMRoutes

if TYPE_CHECKING:
    from rl.learner.policy import Policy

Weights = Mapping[str, torch.Tensor]


class Sender(Protocol):
    """The trainer's end. All ranks hold one and call `collect`; rank 0 alone calls the rest."""

    def collect(self, policy: "Policy") -> Weights:
        """Return what is to be pushed, on rank 0. Collective."""
        ...

    def pack(self, weights: Weights) -> str:
        """Make them ready for all replicas; return their fingerprint."""
        ...

    def connect(self, vllm: VLLMRoutes) -> None:
        """Open the other end, in each worker of a vLLM that has just started.

        What was packed last is what it may be given meanwhile.
        """
        ...

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Have a paused vLLM sample with what was packed, as this version."""
        ...

    def release(self) -> None:
        """Free what no replica reads any more."""
        ...


class WholeWeights:
    """What all ways have in common that push every weight, an adapter merged in."""

    def collect(self, policy: "Policy") -> Weights:
        """Return all weights under Hugging Face names, on rank 0. Collective."""
        return policy.weights()

    def release(self) -> None:
        """Nothing: what is packed next is written over it."""


def load_whole(vllm: VLLMRoutes, version: int, mark: str, where: dict[str, Any]) -> None:
    """Have vLLM read all weights from `where` the reader of this way looks, and finish."""
    vllm.start_update()
    vllm.update({"fingerprint": mark, "where": where})
    vllm.finish_update(version)


class Reader(Protocol):
    """The end inside vLLM, one in each worker."""

    @property
    def read(self) -> Callable[..., dict[str, torch.Tensor]]:
        """Return the weights of one push, given their fingerprint and `where` of `load_whole`.

        Raises:
            RuntimeError: it is not theirs.

        """
        ...

    def close(self) -> None:
        """Let go of the other end."""
        ...
