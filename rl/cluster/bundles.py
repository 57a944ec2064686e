"""Compute the bundles (GPUs and CPUs of one node) that a run reserves in a Ray cluster.

Each vLLM replica gets one bundle, because all GPUs of a replica must be on one node. The ranks get
as few bundles as possible, because ranks on one node exchange gradients faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.cluster.host import Demand


@dataclass(frozen=True)
class Bundle:
    """The numbers of GPUs and logical CPUs on one node, and of training ranks that use them."""

    devices: int
    cores: int
    ranks: int = 0  # training ranks in this bundle; 0 in the bundle of a vLLM replica


def bundles_for(
    demand: Demand,
    nodes: Sequence[Bundle],
    *,
    on_gpus: bool,
    ranks_per_node: int | None,
    cores_per_replica: int,
    cores_per_rank: int,
) -> list[Bundle]:
    """Return one bundle per vLLM replica, followed by the bundles of the training ranks.

    `nodes` has all GPUs and CPUs of each node, including those that other jobs have reserved.
    Raise ValueError if the cluster would be too small even without other jobs.
    """
    largest = max((node.devices for node in nodes), default=0)
    max_ranks = ranks_per_node or (largest if on_gpus and largest else demand.ranks)
    replica = Bundle(demand.devices_per_replica if on_gpus else 0, cores_per_replica)
    bundles = [replica] * demand.replicas
    # Split the ranks evenly: 9 ranks with at most 4 per node become 3, 3, 3 and not 4, 4, 1.
    count = -(-demand.ranks // max_ranks)
    for index in range(count):
        ranks = demand.ranks * (index + 1) // count - demand.ranks * index // count
        bundles.append(Bundle(ranks if on_gpus else 0, ranks * cores_per_rank, ranks))
    for problem in _size_problems(bundles, nodes):
        raise ValueError(problem)
    return bundles


def _size_problems(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> Iterator[str]:
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
                f"one node must have {bundle.devices} GPUs and {bundle.cores} CPUs for {user}, but "
                f"the nodes of the cluster have {available}: lower {remedy}{on_cpus}"
            )
    for what, of in (("GPUs", "devices"), ("CPUs", "cores")):
        needed = sum(getattr(bundle, of) for bundle in bundles)
        total = sum(getattr(node, of) for node in nodes)
        if needed > total:
            yield (
                f"the run needs {needed} {what}, but the cluster has {total}: lower "
                "inference.replicas or trainer.ranks, or add nodes"
            )
