"""Addresses of a run's processes, and the address of this host on a network interface."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from rl.runtime.failure import RunFailed

# This environment variable holds the address where the rollouts process accepts remote ranks.
LISTEN_VARIABLE = "OFFBYONE_ADDRESS"


@dataclass(frozen=True)
class Address:
    """The address on which a server listens: unix:/path of a Unix socket, or tcp://host:port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse unix:/path or tcp://host:port. Raise ValueError if the text is not an address."""
        kind, _, rest = text.partition(":")
        if kind == "unix" and Path(rest).is_absolute():
            return cls(path=Path(rest))
        parts = urlsplit(text)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:  # the port is not a number, or is out of range
            host = port = None
        if kind != "tcp" or not host or not port or parts.path:
            raise ValueError(f"{text} is not an address: write unix:/path or tcp://host:port")
        return cls(host=host, port=port)

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp://{self._authority}"

    @property
    def url(self) -> str:
        """The base URL for HTTP requests. For a Unix socket, its host name is a placeholder."""
        return "http://vllm" if self.path else f"http://{self._authority}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """Return a socket that is connected to this address; raise OSError if no server listens."""
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            opened.settimeout(timeout)
            opened.connect(str(self.path))
        except OSError:
            opened.close()
            raise
        return opened


def bind_collectives(interface: str | None) -> None:
    """Bind gloo and NCCL to `interface`, because they do not authenticate their peers."""
    if interface:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def own_address(interface: str) -> str:
    """Return this host's IPv4 address on an interface. Raise RunFailed if there is none."""
    import psutil  # not at the top, because only runs on several hosts need it

    known = psutil.net_if_addrs()
    found = [a.address for a in known.get(interface, []) if a.family == socket.AF_INET]
    if not found:
        raise RunFailed(
            f"cluster.interface={interface} has no IPv4 address: use one of {', '.join(known)}"
        )
    return found[0]


def free_port(address: str) -> int:
    """Return a TCP port that is free at the time of the call."""
    with socket.create_server((address, 0)) as listener:
        return listener.getsockname()[1]
