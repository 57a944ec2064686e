"""Where ranks of several hosts meet: PyTorch's store, on one address instead of on all of them.

PyTorch lets it listen on every interface, and it knows no keys.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import Store, TCPStore, register_rendezvous_handler

_SCHEME = "listening"


def meeting_of(rank: int) -> str:
    """Return the `init_method` by which a rank meets others at MASTER_ADDR and MASTER_PORT.

    The first one listens there, if MASTER_ADDR is a number: a name may be that of a loopback
    address on the very host that it names. With torchrun its agent listens.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    torchrun_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with suppress(ValueError):
        ip_address(address)
        if rank == 0 and not torchrun_listens:
            host = f"[{address}]" if ":" in address else address
            return f"{_SCHEME}://{host}:{port}"
    return "env://"


def _listen(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """What PyTorch calls with the URL and this process's rank and world size in it."""
    parsed = urlparse(url)
    asked = parse_qs(parsed.query)
    rank, world = int(asked["rank"][0]), int(asked["world_size"][0])
    host, port = str(parsed.hostname), int(parsed.port or 0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=4096)
    store = TCPStore(
        host,
        port,
        world,
        is_master=True,
        timeout=timeout,
        # Else this returns when all have come; init_process_group waits for them anyway.
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    yield store, rank, world


register_rendezvous_handler(_SCHEME, _listen)
