"""A short name for a set of weights: equal when names, shapes, dtypes and bytes are equal."""

from collections.abc import Mapping

import torch
import xxhash


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Return 16 hex digits over all tensors, whatever the order of the mapping."""
    digest = xxhash.xxh3_64()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
