"""Return replicas and routers for the sockets of a test."""

from pathlib import Path

from rl.config.nodes import InferenceNode
from rl.inference.replica import Replica
from rl.inference.router import Router
from rl.runtime.network import Address


def replica_at(socket: Path, name: str = "inference") -> Replica:
    """Return a replica with this socket."""
    return Replica(name, Address(path=socket))


def inference(replicas: int) -> InferenceNode:
    """The node of a run with so many vLLMs."""
    node = {"_target_": "rl.inference.server.VLLMServer", "replicas": replicas}
    return InferenceNode.of({**node, "startup_timeout": 20.0})


def router_to(*sockets: Path) -> Router:
    """Return a router to the replicas inference0, inference1, ..., or to a single one."""
    if len(sockets) == 1:
        return Router.with_replicas(replica_at(*sockets))
    return Router.with_replicas(*(replica_at(s, f"inference{i}") for i, s in enumerate(sockets)))
