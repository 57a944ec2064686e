"""A short name for a set of weights: equal when names, shapes, dtypes and bytes are equal."""

from collections.abc import Mapping

import torch
import xxhash


class Digest:
    """Takes in one tensor after the other; their order counts, so give them by name."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, name: str, tensor: torch.Tensor, content: memoryview) -> None:
        """Take in a tensor, of which `content` is a copy in memory, row by row."""
        self._hash.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        self._hash.update(content)

    def name(self) -> str:
        """16 hex digits."""
        return self._hash.hexdigest()


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Return 16 hex digits over all tensors, whatever the order of the mapping."""
    digest = Digest()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.add(name, tensor, tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.name()
