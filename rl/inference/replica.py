"""One vLLM of a run as the other processes see it: where it listens, and which start of it."""

from dataclasses import dataclass, field

from rl.config.nodes import InferenceNode
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address

_LOOK_S = 2.0


@dataclass(frozen=True)
class Replica:
    """One start of one vLLM."""

    name: str  # of the process: inference, or inference0, ...
    address: Address
    incarnation: int = 0  # one more after each restart
    key: str | None = field(default=None, repr=False)  # its routes ask for it behind a TCP port

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def log(self) -> str:
        """The log file, as messages name it."""
        return f"logs/{self.name}.log"


def closed(replica: Replica) -> bool:
    """Return whether it refuses connections: a busy server accepts them, one that ends does not."""
    try:
        replica.address.connect(_LOOK_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


def started_replicas(run_folder: RunFolder, inference: InferenceNode) -> list[Replica]:
    """Return the vLLMs that were started, each with its newest start."""
    private = run_folder.private
    # External servers must not learn the run's own key.
    key = private.read_servers_key() if inference.is_external else private.read_key()
    endpoints = {name: Endpoint.read(run_folder, name) for name in inference.names}
    return [
        Replica(name, endpoint.address, endpoint.incarnation, key)
        for name, endpoint in endpoints.items()
        if endpoint is not None
    ]
