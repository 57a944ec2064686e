"""The address, key and number of restarts of a vLLM server, for processes that send requests."""

from dataclasses import dataclass, field

from rl.config.nodes import InferenceNode
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address


@dataclass(frozen=True)
class Replica:
    """One vLLM process. After a restart, a new Replica with a higher incarnation replaces it."""

    name: str  # the process name: inference, or inference0, inference1, ...
    address: Address
    incarnation: int = 0  # number of restarts so far
    key: str | None = field(default=None, repr=False)  # key that vLLM requires on a TCP port

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def log(self) -> str:
        return f"logs/{self.name}.log"


def refuses_connections(replica: Replica) -> bool:
    try:
        replica.address.connect(timeout=2.0).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError | FileNotFoundError)
    return False


def started_replicas(run_folder: RunFolder, inference: InferenceNode) -> list[Replica]:
    """Return the newest Replica of each vLLM whose address the supervisor has published."""
    # External servers have their own key and must not receive the run's key.
    key = run_folder.private.read_key(is_external=inference.is_external)
    endpoints = {name: Endpoint.read(run_folder, name) for name in inference.names}
    return [
        Replica(name, endpoint.address, endpoint.incarnation, key)
        for name, endpoint in endpoints.items()
        if endpoint is not None
    ]
