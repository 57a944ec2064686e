"""A hash of weights, which is equal if names, shapes, dtypes and bytes are equal."""

from collections.abc import Mapping

import torch
import xxhash


class Digest:
    """A hash of several tensors, which must be added in alphabetical order of their names."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, name: str, tensor: torch.Tensor, content: memoryview) -> None:
        """Add a tensor to the hash. `content` is its bytes in row-major order."""
        self._hash.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        self._hash.update(content)

    def fingerprint(self) -> str:
        """Return the hash as 16 hex digits."""
        return self._hash.hexdigest()


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of all tensors as 16 hex digits. The order of the mapping does not matter."""
    digest = Digest()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.add(name, tensor, tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.fingerprint()
