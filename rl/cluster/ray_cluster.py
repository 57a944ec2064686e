"""Reserve the hosts of a run in a Ray cluster, where Ray starts one RayNode per bundle.

No training data passes through Ray. Only this module imports Ray, and only if cluster=ray.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from typing import Any, ClassVar

from rl.cluster.bundles import Bundle, bundles_for
from rl.cluster.host import Demand, Hosts
from rl.cluster.local import LocalHost
from rl.cluster.ray_host import RayHost, end_together
from rl.cluster.ray_node import RayNode
from rl.runtime.child import Reaper
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address, own_address

_ANSWERS_S = 5.0
# Ray's defaults would kill the children of an ending RayNode, including the reaper, and
# run our processes at a lower priority than other processes of the node.
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_worker_niceness": "0"}


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """The hosts that Ray reserves for a run. conf/cluster/ray.yaml explains each key."""

    spans_hosts: ClassVar[bool] = True

    address: str
    gpus: bool
    interface: str | None
    ranks_per_node: int | None
    cores_per_replica: int
    cores_per_rank: int
    reserve_timeout: float

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            raise ValueError("cluster=ray needs Ray, which is not installed: pip install ray")

    @contextmanager
    def hosts(self, run_folder: RunFolder, reaper: Reaper, demand: Demand) -> Iterator[Hosts]:
        """Reserve hosts and yield them. After the block, end their processes and release the hosts.

        Raises:
            RunFailed: Ray is unreachable, the cluster is too small, or a node lacks a needed file.
        """
        with ExitStack() as stack:
            ray = _connected(self.address)
            stack.callback(ray.shutdown)
            address = (
                own_address(self.interface) if self.interface else ray.util.get_node_ip_address()
            )
            here = LocalHost(reaper, address)
            stack.callback(here.end)
            try:
                bundles = bundles_for(
                    demand,
                    _nodes(ray),
                    on_gpus=self.gpus,
                    ranks_per_node=self.ranks_per_node,
                    cores_per_replica=self.cores_per_replica,
                    cores_per_rank=self.cores_per_rank,
                )
            except ValueError as error:
                raise RunFailed(f"cluster=ray: {error}") from error
            hosts = [
                RayHost(ray, *place, self.interface)
                for place in _reserved(ray, bundles, self.reserve_timeout, stack)
            ]
            stack.callback(end_together, ray, hosts)
            _require_shared(run_folder, hosts)
            ranks = [h for h, b in zip(hosts, bundles, strict=True) for _ in range(b.ranks)]
            yield Hosts(here, hosts[: demand.replicas], ranks)


def _connected(address: str) -> Any:
    """Connect to the Ray cluster and return the module ray; keep our own SIGTERM handler."""
    import ray  # pyright: ignore[reportMissingImports] an extra

    before = signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address != "auto":  # ray.init would retry for minutes, so test the connection first
            Address.parse(f"tcp://{address}").connect(_ANSWERS_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        # Without this setting, Ray prints the log of a dying node onto the run's screen.
        ray._private.worker._worker_logs_enabled = False  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, ValueError, RuntimeError) as error:
        raise RunFailed(
            f"cluster=ray, but there is no Ray cluster at cluster.address={address} "
            f"({str(error).splitlines()[0]}): start one (ray start --head here, ray start "
            "--address=<this host>:6379 on the others), or correct the address"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    return ray


def _nodes(ray: Any) -> list[Bundle]:
    """Return the total resources of each running node, including reserved resources."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Bundle(int(r.get("GPU", 0)), int(r.get("CPU", 0))) for r in resources]


def _reserved(
    ray: Any, bundles: Sequence[Bundle], timeout: float, stack: ExitStack
) -> Iterator[tuple[Any, str, Bundle]]:
    """Yield (RayNode, node address, bundle) per bundle; `stack` releases the bundles on exit."""
    from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        PlacementGroupSchedulingStrategy,
    )

    both: list[dict[str, float]] = [{"CPU": one.cores, "GPU": one.devices} for one in bundles]
    wanted = [{name: number for name, number in one.items() if number} for one in both]
    group = placement_group(wanted, strategy="PACK")
    stack.callback(remove_placement_group, group)
    if not group.wait(timeout):
        raise RunFailed(
            f"cluster=ray: {wanted} could not be reserved within cluster.reserve_timeout="
            f"{timeout:g} s; free now is {ray.available_resources()}: wait until other jobs have "
            "finished, or lower inference.replicas or trainer.ranks"
        )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    for index, bundle in enumerate(bundles):
        options = ray.remote(RayNode).options(
            num_cpus=bundle.cores,
            num_gpus=bundle.devices,
            runtime_env={"env_vars": _ENVIRONMENT},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        )
        yield options.remote(), addresses[node_of[index]], bundle


def _require_shared(run_folder: RunFolder, hosts: Sequence[RayHost]) -> None:
    """Check that every node sees the run folder, the interpreter and the working folder.

    Raises:
        RunFailed: a node lacks one of these paths; the message names the path and a remedy.
    """
    # Send a hash instead of the key, because Ray's messages are not encrypted.
    key = run_folder.private.key.absolute()
    digest = sha256(key.read_bytes()).hexdigest()
    for host in hosts:
        if problem := host.call("prepare", key, digest, sys.executable, os.getcwd()):
            raise RunFailed(f"the host {host.address} {problem}")
