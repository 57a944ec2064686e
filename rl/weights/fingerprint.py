"""Hash the names, shapes, dtypes and bytes of weights, to tell whether two sets are equal.

Threads hash different tensors in parallel, because a single thread hashes only 8 GB/s.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

_MAX_THREADS = 8


def tensor_hash(tensor: torch.Tensor) -> int:
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(content.numpy().data)


def combine_hashes(weights: Mapping[str, torch.Tensor], hash_of: Callable[[str], int]) -> str:
    """Return one hash of all weights, as 16 hex digits. Several threads call `hash_of(name)`."""
    names = sorted(weights)
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS)) as pool:
        hashes: Iterable[int] = pool.map(hash_of, names)
        parts = [
            f"{name}:{tuple(weights[name].shape)}:{weights[name].dtype}:{found:016x};"
            for name, found in zip(names, hashes, strict=True)
        ]
    return xxhash.xxh3_64_hexdigest("".join(parts).encode())


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    return combine_hashes(weights, lambda name: tensor_hash(weights[name]))
