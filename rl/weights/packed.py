"""Pack all weights into one buffer on the GPU, and compare checksums that the GPU computes.

The checksum of a tensor is the sum, modulo 2**64, of its 64-bit words. First, a bijection
(splitmix64) mixes each word with its position. One changed word always changes the sum. Other
changes keep the sum with a probability of about 2**-64. The checksum finds faults, not forgeries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import _TYPES

from rl.inference.routes import VLLMRoutes
from rl.weights.fingerprint import combine_hashes
from rl.weights.memory_file import layout, require_fingerprint
from rl.weights.transport import Sender, Weights

if TYPE_CHECKING:
    from rl.learner.policy import Policy

_ALIGNMENT = 256  # Each tensor starts at a multiple of this number of bytes. Zeros fill the gaps.
_WORDS = 1 << 22  # number of words that are mixed at once, which limits the temporary memory
_STEP, _FIRST, _SECOND = (  # constants of splitmix64, as signed numbers
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(kw_only=True)
class PackedSender(Sender):
    """The base class of senders that keep the packed weights in the memory of the trainer's GPU."""

    on_gpus: ClassVar[bool] = True
    device: ClassVar[str] = "cuda"

    def open(self, timeout: float) -> None:
        self._timeout, self._header = timeout, dict[str, Any]()
        self._packed: Weights = {}  # weights of the last push, as views of the buffer

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def collect(self, policy: "Policy") -> Weights:
        return policy.weights(self._packed)

    def pack(self, weights: Weights) -> str:
        """Write the weights into the buffer. Return their fingerprint when the GPU is done."""
        header, end = layout(weights, _ALIGNMENT)
        if header != self._header:
            self._header, self.buffer = header, self.allocate(-(-end // _ALIGNMENT) * _ALIGNMENT)
            self._packed = _views(self.buffer, header)
        for name, view in self._packed.items():
            if view.data_ptr() != weights[name].data_ptr():
                view.copy_(weights[name].detach())
        self._fingerprint = _fingerprint(self._packed, self.buffer, header)
        return self._fingerprint

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:  # noqa: ARG002 the same for every vLLM
        return {"header": self._header}


def unpack(
    buffer: torch.Tensor, header: Mapping[str, Any], fingerprint: str
) -> dict[str, torch.Tensor]:
    """Return the weights as views of `buffer`. Raise RuntimeError if they are not the trainer's."""
    weights = _views(buffer, header)
    return require_fingerprint(weights, fingerprint, _fingerprint(weights, buffer, header))


def _views(buffer: torch.Tensor, header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: buffer[slice(*form["data_offsets"])].view(_TYPES[form["dtype"]]).view(form["shape"])
        for name, form in header.items()
    }


def _fingerprint(
    weights: Mapping[str, torch.Tensor], buffer: torch.Tensor, header: Mapping[str, Any]
) -> str:
    words = buffer.view(torch.int64)
    ends = [form["data_offsets"] for form in header.values()]
    sums = [checksum(words[begin // 8 : -(-end // 8)]) for begin, end in ends]
    # Copy all sums to the CPU at once. This waits until the GPU is done, as `pack` promises.
    checksums = dict(zip(header, torch.stack(sums).tolist(), strict=True))
    return combine_hashes(weights, checksums.__getitem__)


def checksum(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed int64 words [N] (see the module's docstring)."""
    total = words.new_zeros(())
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        position = torch.arange(start + 1, start + 1 + len(part), device=words.device)
        mixed = part ^ (position * _STEP)
        for bits, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            # Mask the sign bits that `>>` inserts, because they would break the bijection.
            mixed = (mixed ^ ((mixed >> bits) & ((1 << (64 - bits)) - 1))) * factor
        total += mixed.sum()
    return total
