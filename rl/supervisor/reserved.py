"""What a plan asks of its hosts, and the plan with the devices that they turned out to have."""

from dataclasses import replace

from rl.cluster.host import Demand, Hosts
from rl.config.schema import Run
from rl.placement.placement import Plan


def demand_of(run: Run, plan: Plan) -> Demand:
    """Return what a plan needs of its hosts."""
    return Demand(len(plan.inference), run.inference.tensor_parallel_size, len(plan.ranks))


def on_hosts(plan: Plan, hosts: Hosts) -> Plan:
    """Return the plan with the devices of its reserved hosts."""
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
