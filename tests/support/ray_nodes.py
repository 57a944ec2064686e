"""Start a real Ray with several pretended nodes on this machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LEAST = {"object_store_memory": 80_000_000}  # bytes; we store no objects there
_QUICK = {
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 5,
    "health_check_timeout_ms": 1000,
}


@contextmanager
def ray_nodes(cores: Sequence[int], gpus: int = 0, head_cores: int = 0) -> Iterator[Any]:
    """Start a head, and a node at 127.0.0.2, ... per entry of `cores`; yield the cluster."""
    from ray.cluster_utils import Cluster

    head = {**_LEAST, "num_cpus": head_cores, "_system_config": _QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number, of_node in enumerate(cores):
            address = f"127.0.0.{2 + number}"
            cluster.add_node(node_ip_address=address, num_cpus=of_node, num_gpus=gpus, **_LEAST)
        yield cluster
    finally:
        cluster.shutdown()
