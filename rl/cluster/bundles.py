"""What is reserved of a cluster, one bundle per machine: for each replica, and for groups of ranks.

A bundle always lies on one node. A replica needs just that, because tensor parallelism stays within
a node. Ranks share as few nodes as possible, because they exchange the most data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.cluster.host import Demand


@dataclass(frozen=True)
class Bundle:
    """What one machine gives: numbers of GPUs and of logical CPUs, for how many ranks."""

    devices: int
    cores: int
    ranks: int = 0  # 0: the bundle is a replica's


def bundles_for(
    demand: Demand,
    nodes: Sequence[Bundle],
    *,
    on_gpus: bool,
    ranks_per_node: int | None,
    cores_per_replica: int,
    cores_per_rank: int,
) -> list[Bundle]:
    """Return a bundle for each replica, then those of the ranks.

    Args:
        demand: what the run needs.
        nodes: what each machine of the cluster has, whether it is free or not.
        on_gpus: whether the processes compute on GPUs.
        ranks_per_node: ranks on one node; None: as many as the largest machine has GPUs for.
        cores_per_replica: logical CPUs beside the GPUs of a replica.
        cores_per_rank: logical CPUs of a rank.

    Raises:
        ValueError: not even an empty cluster has that much; says what to lower.

    """
    largest = max((node.devices for node in nodes), default=0)
    together = ranks_per_node or (largest if on_gpus and largest else demand.ranks)
    replica = Bundle(demand.devices_per_replica if on_gpus else 0, cores_per_replica)
    bundles = [replica] * demand.replicas
    for ranks in _shares(demand.ranks, together):
        bundles.append(Bundle(ranks if on_gpus else 0, ranks * cores_per_rank, ranks))
    for problem in _problems(bundles, nodes):
        raise ValueError(problem)
    return bundles


def _shares(ranks: int, together: int) -> Iterator[int]:
    """Yield even shares: 9 ranks, at most 4 together, are 3, 3, 3 and not 4, 4, 1."""
    hosts = -(-ranks // together)
    for host in range(hosts):
        yield ranks * (host + 1) // hosts - ranks * host // hosts


def _problems(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> Iterator[str]:
    available = "; ".join(sorted({f"{node.devices} GPUs and {node.cores} CPUs" for node in nodes}))
    has_no_gpu = not any(node.devices for node in nodes)
    on_cpus = ", or set cluster.gpus=false" if has_no_gpu and bundles[0].devices else ""
    for bundle in bundles:
        if not any(n.devices >= bundle.devices and n.cores >= bundle.cores for n in nodes):
            user, remedy = (
                (f"{bundle.ranks} ranks", "cluster.ranks_per_node or cluster.cores_per_rank")
                if bundle.ranks
                else ("a replica", "inference.tensor_parallel_size or cluster.cores_per_replica")
            )
            yield (
                f"{user} on one node need {bundle.devices} GPUs and {bundle.cores} CPUs, and no "
                f"node of the cluster has as many ({available}): lower {remedy}{on_cpus}"
            )
    for what, of in (("GPUs", "devices"), ("CPUs", "cores")):
        needed = sum(getattr(bundle, of) for bundle in bundles)
        total = sum(getattr(node, of) for node in nodes)
        if needed > total:
            yield (
                f"the run needs {needed} {what} and the cluster has {total}: lower "
                "inference.replicas or trainer.ranks, or add nodes"
            )
