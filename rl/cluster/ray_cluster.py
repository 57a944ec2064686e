"""The cluster for cluster=ray: reserve bundles in a Ray cluster and start a RayNode in each.

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

# Without these variables, Ray kills the reaper (rl/runtime/child.py) when a RayNode ends, and gives
# our processes a lower CPU priority than other processes of the node.
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_worker_niceness": "0"}


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """The options of conf/cluster/ray.yaml."""

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
            raise ValueError("cluster=ray needs Ray, which is not installed: run `pip install ray`")

    @contextmanager
    def hosts(self, run_folder: RunFolder, reaper: Reaper, demand: Demand) -> Iterator[Hosts]:
        with ExitStack() as stack:
            ray = _connect(self.address)
            stack.callback(ray.shutdown)
            address = (
                own_address(self.interface) if self.interface else ray.util.get_node_ip_address()
            )
            here = LocalHost(reaper, address)
            stack.callback(here.end)
            resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            try:
                bundles = bundles_for(
                    demand,
                    [Bundle(int(r.get("GPU", 0)), int(r.get("CPU", 0))) for r in resources],
                    on_gpus=self.gpus,
                    ranks_per_node=self.ranks_per_node,
                    cores_per_replica=self.cores_per_replica,
                    cores_per_rank=self.cores_per_rank,
                )
            except ValueError as error:
                raise RunFailed(f"cluster=ray: {error}") from error
            hosts = [
                RayHost(ray, *place, self.interface)
                for place in _reserve(ray, bundles, self.reserve_timeout, stack)
            ]
            stack.callback(end_together, ray, hosts)
            # Send a hash of the key, because Ray does not encrypt its messages.
            key = run_folder.private.key.absolute()
            digest = sha256(key.read_bytes()).hexdigest()
            for host in hosts:
                if problem := host.call("prepare", key, digest, sys.executable, os.getcwd()):
                    raise RunFailed(f"the host {host.address} {problem}")
            ranks = [h for h, b in zip(hosts, bundles, strict=True) for _ in range(b.ranks)]
            yield Hosts(here, hosts[: demand.replicas], ranks)


def _connect(address: str) -> Any:
    import ray  # pyright: ignore[reportMissingImports] an optional package

    before = signal.getsignal(signal.SIGTERM)  # ray.init replaces the handler
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address != "auto":  # test the address first, because ray.init would retry for minutes
            Address.parse(f"tcp://{address}").connect(timeout=5.0).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        # Without this line, Ray prints the log of a failed RayNode over the run's screen.
        ray._private.worker._worker_logs_enabled = False  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, ValueError, RuntimeError) as error:
        raise RunFailed(
            f"cluster=ray, but there is no Ray cluster at cluster.address={address} "
            f"({str(error).splitlines()[0]}): run `ray start --head` on this host and "
            "`ray start --address=<this host>:6379` on other hosts, or correct cluster.address"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    return ray


def _reserve(
    ray: Any, bundles: Sequence[Bundle], timeout: float, stack: ExitStack
) -> Iterator[tuple[Any, str, Bundle]]:
    """Reserve bundles, which `stack` releases. Yield (RayNode, IP address, bundle) for each."""
    from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        PlacementGroupSchedulingStrategy,
    )

    resources: list[dict[str, float]] = [{"CPU": one.cores, "GPU": one.devices} for one in bundles]
    wanted = [{name: number for name, number in one.items() if number} for one in resources]
    group = placement_group(wanted, strategy="PACK")
    stack.callback(remove_placement_group, group)
    if not group.wait(timeout):
        raise RunFailed(
            f"cluster=ray: {wanted} could not be reserved within cluster.reserve_timeout="
            f"{timeout:g} s, because only {ray.available_resources()} is free: wait until other "
            "jobs have ended, or lower inference.replicas or trainer.ranks"
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
