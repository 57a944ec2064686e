"""Compute devices, process counts and vLLM's memory of a run before its processes start.

check        validates keys, types, ranges, rules        rl/config/check.py
Run.of       creates typed nodes                         rl/config/nodes.py
placement    assigns devices and threads to processes    rl/placement/placement.py
with_plan    sets process counts and vLLM's flags        rl/placement/settings.py
size_memory  sets vLLM's memory from the model's sizes   rl/placement/budget.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

from rl.cluster.host import Hosts
from rl.config.check import check
from rl.config.schedules import split_schedules
from rl.config.schema import ConfigError, Run, as_config_error
from rl.config.transport import NO_ADAPTED_EXPERTS, placement_problem
from rl.model.lora import check_targets
from rl.model.shape import Shape
from rl.placement.budget import fit_memory, gpu_excess, process_memory
from rl.placement.installed import device_problem
from rl.placement.page import plan_text
from rl.placement.placement import Plan, placement
from rl.placement.settings import with_plan
from rl.runtime.devices import Host, this_host


@dataclass(frozen=True)
class Resolved:
    run: Run  # the configuration, with the numbers of GPUs, ranks and replicas filled in
    plan: Plan  # devices and threads of each process
    machines: Sequence[Host]  # hosts; with cluster=ray and no given hosts, one imaginary host

    def size_memory(self, sizes: Shape | None) -> tuple[Self, str]:
        """Return (copy with vLLM's memory set for a model of these sizes, text of the plan)."""
        if sizes and sizes.expert and self.run.adapter.freezes_base:
            with as_config_error():
                check_targets(self.run.adapter.target_modules)
            if self.run.pushes_adapter and not self.plan.on_gpus:
                raise ConfigError([f"{NO_ADAPTED_EXPERTS}: use sync=shm, which pushes all weights"])
        if sizes is None:  # no model yet, or its config.json is not supported
            return self, plan_text(self.plan, None, self.machines)
        run = fit_memory(self.run, self.plan, sizes, self.machines)
        memory = process_memory(run, self.plan, sizes)
        page = plan_text(self.plan, memory, self.machines)
        for excess in islice(gpu_excess(memory, self.machines, run), 1):
            page += f"\nthe run may fail (estimates are up to 15 % off): {excess}"
        return replace(self, run=run), page


def resolve(config: Mapping[str, Any], machines: Sequence[Host] | None = None) -> Resolved:
    """Return the run that `config` describes, with devices of `machines` (None: this machine)."""
    check(config)
    with as_config_error():
        return assign_devices(Run.of(split_schedules(config)), machines)


def assign_devices(run: Run, machines: Sequence[Host] | None = None) -> Resolved:
    """Assign devices to the processes of a checked run. Raise ConfigError if devices do not fit."""
    if run.trainer.debug:
        run = run.with_values({"trainer.ranks": 1})
    if run.cluster.spans_hosts:
        plan, machines = _plan_reservation(run, machines)
    else:
        given, machines = machines, machines or [this_host()]
        plan = placement(run, machines)
        group = run.inference.tensor_parallel_size if run.starts_vllm else 1
        uses_nccl = max(len(plan.ranks), group) > 1 or run.transport.has("own_gpus")
        problem = device_problem(machines[0], needs_vllm=run.starts_vllm, uses_nccl=uses_nccl)
        if given is None and problem:
            raise ConfigError([problem])
    shared = any(map(plan.is_shared, plan.inference))
    sync_problem = placement_problem(run.transport, on_gpus=plan.on_gpus, shared=shared)
    if run.sampler.uses_vllm and sync_problem:
        raise ConfigError([sync_problem])
    return Resolved(with_plan(run, plan), plan, machines)


def _plan_reservation(run: Run, machines: Sequence[Host] | None) -> tuple[Plan, Sequence[Host]]:
    """Plan a run whose hosts Ray reserves later. An unset count of replicas or ranks means one."""
    inference, cluster = run.inference, run.cluster
    replicas, ranks = inference.replicas or 1, run.trainer.ranks or 1
    counted = run.with_values({"inference.replicas": replicas, "trainer.ranks": ranks})
    if machines:  # idle=(), because Ray may give the remaining GPUs to other jobs
        return replace(placement(counted, machines), idle=()), machines
    gpus = range(inference.tensor_parallel_size * replicas + ranks) if cluster.gpus else ()
    machines = [Host(devices=tuple(map(str, gpus)), cores=1, cpus=1)]
    plan = placement(counted, machines)
    replica_threads = None if gpus else cluster.cores_per_replica
    rank_threads = run.trainer.num_threads or cluster.cores_per_rank
    return replace(
        plan,
        inference=tuple(replace(place, threads=replica_threads) for place in plan.inference),
        ranks=tuple(replace(place, threads=rank_threads) for place in plan.ranks),
    ), machines


def with_devices(plan: Plan, hosts: Hosts) -> Plan:
    """Return the plan with the devices that Ray has reserved on the hosts of the run."""
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
