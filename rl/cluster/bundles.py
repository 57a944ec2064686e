"""What is reserved of a cluster, one bundle a machine: for each replica, and for ranks together.

A bundle lies on one node by its nature. Replicas need nothing more, for tensor parallelism stays
within one; ranks share as few nodes as they fit on, because they talk most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.cluster.host import Demand


@dataclass(frozen=True)
class Bundle:
    """What one machine gives: numbers of GPUs and of logical CPUs, for how many ranks."""

    devices: int
    cores: int
    ranks: int = 0  # 0: it is a replica's


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
        nodes: what each machine of the cluster has, taken or not.
        on_gpus: whether the parts compute on GPUs.
        ranks_per_node: as many together; None: as many as the largest machine has GPUs for.
        cores_per_replica: logical CPUs beside the GPUs of a replica.
        cores_per_rank: logical CPUs of a rank.

    Raises:
        ValueError: the cluster cannot give that, whoever else leaves it; says why and what would.

    """
    largest = max((node.devices for node in nodes), default=0)
    together = ranks_per_node or (largest if on_gpus and largest else demand.ranks)
    bundles = [
        Bundle(demand.devices_per_replica if on_gpus else 0, cores_per_replica)
        for _ in range(demand.replicas)
    ]
    for ranks in _shares(demand.ranks, together):
        bundles.append(Bundle(ranks if on_gpus else 0, ranks * cores_per_rank, ranks))
    for problem in _problems(bundles, nodes):
        raise ValueError(problem)
    return bundles


def _shares(ranks: int, together: int) -> Iterator[int]:
    """9 ranks, at most 4 together: 3, 3, 3 and not 4, 4, 1."""
    hosts = -(-ranks // together)
    for host in range(hosts):
        yield ranks * (host + 1) // hosts - ranks * host // hosts


def _problems(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> Iterator[str]:
    there = "; ".join(sorted({f"{node.devices} GPUs and {node.cores} CPUs" for node in nodes}))
    without = not any(node.devices for node in nodes)
    cpus = ", or set cluster.gpus=false" if without and bundles[0].devices else ""
    for bundle in bundles:
        if not any(n.devices >= bundle.devices and n.cores >= bundle.cores for n in nodes):
            who, remedy = (
                (f"{bundle.ranks} ranks", "cluster.ranks_per_node or cluster.cores_per_rank")
                if bundle.ranks
                else ("a replica", "inference.tensor_parallel_size or cluster.cores_per_replica")
            )
            yield (
                f"{who} on one node need {bundle.devices} GPUs and {bundle.cores} CPUs, and no "
                f"node of the cluster has as many ({there}): lower {remedy}{cpus}"
            )
    for what, of in (("GPUs", "devices"), ("CPUs", "cores")):
        needed = sum(getattr(bundle, of) for bundle in bundles)
        total = sum(getattr(node, of) for node in nodes)
        if needed > total:
            yield (
                f"the run needs {needed} {what} and the cluster has {total}: lower "
                "inference.replicas or trainer.ranks, or add nodes"
            )
