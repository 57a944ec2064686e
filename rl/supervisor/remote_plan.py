"""The places of a run whose machines are known only once they are reserved, or never."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rl.cluster.host import Demand, Hosts
from rl.config.facts import spans_hosts
from rl.config.schema import Run
from rl.placement.placement import Place, Plan, placement
from rl.run.devices import Host, this_host


def planned(config: Mapping[str, Any] | Run) -> Plan:
    """Return the places of a run's processes, on this machine or on others yet to come.

    Raises:
        ConfigError: they do not fit.

    """
    config = asdict(config) if isinstance(config, Run) else config
    cluster = config["cluster"]
    if not spans_hosts(cluster):
        return placement(config, [this_host()])
    # What each of them will have is reserved by these very numbers.
    size = (config["inference"] or {}).get("tensor_parallel_size") or 1
    replicas = (config["inference"] or {}).get("replicas") or 1
    ranks = config["trainer"]["ranks"] or 1
    gpus = range(size * replicas + ranks) if cluster["gpus"] else ()
    reserved = Host(devices=tuple(map(str, gpus)), cores=1, cpus=1)
    numbers = {**config, "trainer": {**config["trainer"], "ranks": ranks}}
    plan = placement(numbers, [reserved])
    threads = None if cluster["gpus"] else cluster.get("cores_per_replica")
    inference = tuple(replace(place, threads=threads) for place in plan.inference)
    of_rank = config["trainer"]["num_threads"] or cluster.get("cores_per_rank")
    return replace(plan, inference=inference, ranks=_each(plan.ranks, threads=of_rank))


def demand_of(config: Run, plan: Plan) -> Demand:
    """Return what a plan needs of its hosts."""
    size = config.inference.get("tensor_parallel_size") or 1
    return Demand(len(plan.inference), size, len(plan.ranks))


def on_hosts(plan: Plan, hosts: Hosts) -> Plan:
    """Return the plan with the devices that its hosts turned out to have."""
    if all(host is hosts.here for host in (*hosts.replicas, *hosts.ranks)):
        return plan
    inference = tuple(
        replace(place, devices=tuple(host.devices))
        for place, host in zip(plan.inference, hosts.replicas, strict=True)
    )
    ranks = []
    for rank, (place, host) in enumerate(zip(plan.ranks, hosts.ranks, strict=True)):
        local = hosts.local_rank(rank)
        own, visible = tuple(host.devices[local : local + 1]), tuple(host.devices)
        ranks.append(replace(place, devices=own, visible=visible, local_rank=local))
    return replace(plan, inference=inference, ranks=tuple(ranks))


def _each(places: tuple[Place, ...], **changes: Any) -> tuple[Place, ...]:
    return tuple(replace(place, **changes) for place in places)
