"""The places of a run whose machines are known only once they are reserved, or never."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl.cluster.host import Demand, Hosts
from rl.config.facts import spans_hosts
from rl.config.schema import Run
from rl.placement.placement import Plan, placement
from rl.run.devices import Host, this_host


def planned(
    config: Mapping[str, Any], machines: list[Host] | None = None
) -> tuple[Plan, list[Host]]:
    """Return the places of a run's processes, and the machines: this one, or some yet to come.

    `machines` are what to plan for instead.

    Raises:
        ConfigError: they do not fit.

    """
    cluster = config["cluster"]
    if not spans_hosts(cluster):
        hosts = machines or [this_host()]
        return placement(config, hosts), hosts
    config = _counted(config)
    if machines:
        return replace(placement(config, machines), idle=()), machines  # the rest is not reserved
    inference, trainer = config["inference"] or {}, config["trainer"]
    size, replicas = inference.get("tensor_parallel_size") or 1, inference.get("replicas") or 1
    gpus = range(size * replicas + trainer["ranks"]) if cluster["gpus"] else ()
    reserved = Host(devices=tuple(map(str, gpus)), cores=1, cpus=1)
    plan = placement(config, [reserved])
    of_replica = None if gpus else cluster.get("cores_per_replica")
    of_rank = trainer["num_threads"] or cluster.get("cores_per_rank")
    places = tuple(replace(place, threads=of_replica) for place in plan.inference)
    ranks = tuple(replace(place, threads=of_rank) for place in plan.ranks)
    return replace(plan, inference=places, ranks=ranks), [reserved]


def _counted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return it with 1 for each count that is null: as much is reserved as they say."""
    inference, trainer = config["inference"], config["trainer"]
    if inference and "replicas" in inference:
        inference = {**inference, "replicas": inference["replicas"] or 1}
    trainer = {**trainer, "ranks": trainer["ranks"] or 1}
    return {**config, "inference": inference, "trainer": trainer}


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
