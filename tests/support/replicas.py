"""vLLMs behind sockets of a test."""

from pathlib import Path

from rl.inference.replica import Replica
from rl.inference.router import Router
from rl.run.address import Address


def replica_at(socket: Path, name: str = "inference") -> Replica:
    """Whatever listens there."""
    return Replica(name, Address(path=socket))


def router_to(*sockets: Path) -> Router:
    """A router to whatever listens there: inference0, inference1, ..., or to the only one."""
    if len(sockets) == 1:
        return Router.to(replica_at(*sockets))
    return Router.to(*(replica_at(s, f"inference{i}") for i, s in enumerate(sockets)))
