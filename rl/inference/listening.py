"""Where the vLLMs of a run will listen: the sockets in its folder, or ports that are kept for them.

A port that is only looked up may be somebody else's by the time vLLM binds it, half a minute later.
Here a socket is bound to it and never listens. vLLM binds the same port beside it, as SO_REUSEADDR
allows where nobody listens, and the kernel gives it to nobody who asks for any free one.
"""

import socket

from rl.inference.replica import Replica, replica_names
from rl.inference.server import VLLMServer
from rl.run.address import Address
from rl.run.folder import RunFolder

LOOPBACK = "127.0.0.1"


class Listening:
    """Keeps ports until `close`."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self._kept: list[socket.socket] = []

    def replicas(self, server: VLLMServer, host: str = LOOPBACK) -> list[Replica]:
        """Return the vLLMs of this run; those on ports of the interface `host` ask for its key."""
        names, private = replica_names(server.replicas or 1), self._run_folder.private
        if server.listen == "unix":
            return [Replica(name, Address(path=private.vllm_socket_of(name))) for name in names]
        if private.read_key() is None:
            private.make_key()
        key = private.read_key()
        return [Replica(name, self._port(host), key=key) for name in names]

    def _port(self, host: str) -> Address:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kept = socket.socket(family)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, 0))
        self._kept.append(kept)
        return Address(host=host, port=kept.getsockname()[1])

    def close(self) -> None:
        """Give the ports back; one that a vLLM listens on stays its own until it ends."""
        for kept in self._kept:
            kept.close()
        self._kept.clear()
