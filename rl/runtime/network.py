"""Addresses of the processes of a run, and the address by which other hosts reach this one."""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from rl.runtime.failure import RunFailed

_SIOCGIFADDR = 0x8915  # Linux: return the IPv4 address of an interface
_ELSEWHERE = ("192.0.2.1", 9)  # TEST-NET-1, an unused network that the default route leads to

# The environment variable with the address that the rollouts process listens on for other hosts.
LISTEN_VARIABLE = "OFFBYONE_ADDRESS"


@dataclass(frozen=True)
class Address:
    """`path` of a Unix socket, or `host` and `port`; as text unix:/path or tcp://host:port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that a text names.

        Raises:
            ValueError: the text is not an address.

        """
        kind, _, rest = text.partition(":")
        if kind == "unix" and Path(rest).is_absolute():
            return cls(path=Path(rest))
        parts = urlsplit(text)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:  # the port is not a number, or out of range
            host = port = None
        if kind != "tcp" or not host or not port or parts.path:
            raise ValueError(f"{text} is no address: write unix:/path or tcp://host:port")
        return cls(host=host, port=port)

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp://{self._authority}"

    @property
    def url(self) -> str:
        """The start of its HTTP URLs. For a Unix socket the host name is made up."""
        return "http://vllm" if self.path else f"http://{self._authority}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """Return a blocking socket to the listener; raise OSError if there is none."""
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
    """Make gloo and NCCL of this process listen on a network interface, if one is named.

    They have no authentication, so the interface should be private.
    """
    if interface:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def own_address(interface: str | None = None) -> str:
    """Return the IPv4 address of a network interface; None: that of the default route.

    Raises:
        RunFailed: the interface has no address; the message is for the user.

    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            if interface is None:
                asked.connect(_ELSEWHERE)  # chooses a route; a datagram socket sends nothing yet
                return asked.getsockname()[0]
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
        except OSError as error:
            raise RunFailed(_no_address(interface)) from error
    return socket.inet_ntoa(answer[20:24])


def _no_address(interface: str | None) -> str:
    there = ", ".join(name for _, name in socket.if_nameindex())
    if interface is None:
        return f"no default route says how others reach this host: set cluster.interface ({there})"
    return f"cluster.interface={interface} has no IPv4 address here: choose one of {there}"


def free_port(address: str) -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.create_server((address, 0)) as listener:
        return listener.getsockname()[1]
