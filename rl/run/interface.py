"""By which address other machines reach this one, and which ports are free there."""

import fcntl
import os
import socket
import struct

from rl.run.failure import RunFailed

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ELSEWHERE = ("192.0.2.1", 9)  # TEST-NET-1: nobody's, so the default route leads there

_TOLD = "OFFBYONE_ADDRESS"


def listening_address(interface: str | None) -> str:
    """Return what a part of a run over several hosts listens on: what its host told it, if any.

    A part that was started by hand finds out by itself.
    """
    return os.environ.get(_TOLD) or own_address(interface)


def network_environment(address: str) -> dict[str, str]:
    """What a host tells its parts: the address to listen on."""
    return {_TOLD: address}


def bind_collectives(interface: str | None) -> None:
    """Have gloo and NCCL, which know no keys, listen on an interface of that name in this process.

    Where none is named they look for one by themselves.
    """
    if interface:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def own_address(interface: str | None = None) -> str:
    """Return the IPv4 address of a network interface; None: of the one that the default route uses.

    Raises:
        RunFailed: there is none; the message is for the user.

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
    """Return a TCP port that nobody listened on a moment ago."""
    with socket.create_server((address, 0)) as listener:
        return listener.getsockname()[1]
