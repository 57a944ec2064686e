"""One vLLM of a run as the other parts see it: where it listens, and since which of its starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.run.address import Address
from rl.run.endpoint import Endpoint
from rl.run.folder import RunFolder

_LOOK_S = 2.0
NOWHERE_YET = Address()  # of one that somebody starts by hand, who knows where


@dataclass(frozen=True)
class Replica:
    """Attributes: `name` of the part (inference, or inference0, ...), `key` of its TCP routes."""

    name: str
    address: Address
    incarnation: int = 0
    key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What every request brings."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def log(self) -> str:
        """Where to look, for a sentence."""
        return f"logs/{self.name}.log"


def closed(replica: Replica) -> bool:
    """True where nobody takes connections: a busy server does, one that shuts down does not."""
    try:
        replica.address.connect(_LOOK_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def replica_names(number: int) -> list[str]:
    """The parts that vLLMs are; the only one has no number."""
    return ["inference"] if number == 1 else [f"inference{i}" for i in range(number)]


def names_of(inference: Mapping[str, Any]) -> list[str]:
    """The vLLMs of a configuration: those it starts, or those it knows the URLs of."""
    urls = inference.get("urls")
    return replica_names((inference["replicas"] or 1) if urls is None else len(urls))


def started_replicas(run_folder: RunFolder, inference: Mapping[str, Any]) -> list[Replica]:
    """Return those vLLMs of a configuration that were started, each since its newest start."""
    private = run_folder.private
    # Somebody else's must not see the run's own.
    key = private.read_key() if inference.get("urls") is None else private.read_servers_key()
    endpoints = {name: Endpoint.read(run_folder, name) for name in names_of(inference)}
    return [
        Replica(name, endpoint.address, endpoint.incarnation, key)
        for name, endpoint in endpoints.items()
        if endpoint is not None
    ]
