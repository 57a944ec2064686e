"""Start a real Ray with several pretended nodes on this machine.

    python -m tests.support.ray_nodes 1 1 1 -- python train.py cluster=ray cluster.gpus=false ...

starts a head, and for each number a node with as many cores at 127.0.0.2, 127.0.0.3, .... Then it
runs the command, whose cluster.address=auto finds this Ray.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LEAST = {"object_store_memory": 80_000_000}  # bytes; we store no objects there
_QUICK = {"health_check_period_ms": 200, "health_check_failure_threshold": 5}


@contextmanager
def ray_nodes(cores: Sequence[int], gpus: int = 0, head_cores: int = 0) -> Iterator[Any]:
    """Start a head and a node per entry of `cores`; yield the cluster."""
    from ray.cluster_utils import Cluster

    head = {**_LEAST, "num_cpus": head_cores}
    quick = {**_QUICK, "health_check_timeout_ms": 1000}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": quick})
    try:
        for number, of_node in enumerate(cores):
            address = f"127.0.0.{2 + number}"
            cluster.add_node(node_ip_address=address, num_cpus=of_node, num_gpus=gpus, **_LEAST)
        yield cluster
    finally:
        cluster.shutdown()


def main(arguments: Sequence[str]) -> int:
    """Run a command with such a Ray; return its exit status."""
    end = arguments.index("--")
    with ray_nodes([int(number) for number in arguments[:end]]) as cluster:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        return subprocess.run(arguments[end + 1 :], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
