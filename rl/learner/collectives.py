"""Exchange bytes between ranks, and create the store through which processes connect.

PyTorch's collectives for Python objects unpickle the bytes that they receive, which can run code.
This module never unpickles, because gloo and NCCL do not authenticate senders.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the `data` of every rank, in the order of the ranks. Collective."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = bytearray(data.ljust(max(int(each) for each in sizes) + 1, b"\0"))
    content = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    contents = [torch.empty_like(content) for _ in sizes]
    dist.all_gather(contents, content)
    pairs = zip(contents, sizes, strict=True)
    return [each.cpu().numpy().tobytes()[: int(length)] for each, length in pairs]


def create_store(host: str, port: int, world_size: int | None, timeout: timedelta) -> dist.TCPStore:
    """Create a TCPStore that listens only on `host`. PyTorch would listen on all addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=4096) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
