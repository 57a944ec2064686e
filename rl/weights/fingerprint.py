"""A short name for a set of weights: equal if names, shapes, dtypes and bytes are equal."""

from collections.abc import Mapping

import torch
import xxhash


class Digest:
    """Hashes one tensor after the other; add them in the order of their names."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, name: str, tensor: torch.Tensor, content: memoryview) -> None:
        """Hash a tensor; `content` holds its bytes, row by row."""
        self._hash.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        self._hash.update(content)

    def fingerprint(self) -> str:
        """Return 16 hex digits."""
        return self._hash.hexdigest()


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Return 16 hex digits over all tensors, in whatever order the mapping has them."""
    digest = Digest()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.add(name, tensor, tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.fingerprint()
