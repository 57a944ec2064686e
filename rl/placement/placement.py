"""Assign GPUs and CPU cores to the vLLM replicas and trainer ranks of a run.

    several GPUs    by default, ranks use the first GPUs, one each, and replicas the last GPUs
    one GPU         trainer and vLLM share it (rl/placement/budget.py computes vLLM's share)
    no GPU          ranks use all CPUs (with vLLM one less), replicas all physical cores but one

With several GPUs, the trainer uses one half and vLLM the other half if trainer.ranks,
inference.replicas, trainer.devices and inference.devices are null.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rl.config.schema import ConfigError, Run
from rl.runtime.devices import Host

Device = tuple[int, str]  # (number of the host, GPU's name as in CUDA_VISIBLE_DEVICES)
_REMEDY = (
    "change trainer.ranks, inference.replicas or inference.tensor_parallel_size, or list the GPUs "
    "in trainer.devices and inference.devices (trainer and vLLM share a GPU that is in both lists)"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The host, GPUs and CPU threads of one process."""

    host: int  # number of the host, from 0
    devices: tuple[str, ...]  # names of the GPUs that the process uses, or empty on a CPU
    threads: int | None  # number of CPU threads, or None for no limit
    # `visible` has the GPUs that the process can see, or is () if these are `devices`. For NCCL, a
    # rank must see the GPUs of all ranks of its host. The rank computes on `visible[local_rank]`.
    visible: tuple[str, ...] = ()
    local_rank: int | None = None  # number of the rank on its host, from 0; None for vLLM

    def environment(self) -> dict[str, str]:
        visible = self.visible or self.devices
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(visible) or None,
            # Make CUDA number the GPUs like nvidia-smi, because `devices` has nvidia-smi's numbers.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID" if visible else None,
            "OMP_NUM_THREADS": self.threads,
            "LOCAL_RANK": self.local_rank,
        }
        return {name: str(value) for name, value in variables.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The host, GPUs and threads of each vLLM replica and trainer rank of a run."""

    inference: tuple[Place, ...]  # vLLM's replicas, or empty if the run starts no vLLM
    ranks: tuple[Place, ...]
    idle: tuple[Device, ...] = ()  # GPUs that no process uses

    @property
    def on_gpus(self) -> bool:
        return any(place.devices for place in (*self.inference, *self.ranks))

    def is_shared(self, place: Place) -> bool:
        others = self.ranks if place in self.inference else self.inference
        return any(
            other.host == place.host and set(other.devices) & set(place.devices) for other in others
        )


def placement(run: Run, hosts: Sequence[Host]) -> Plan:
    """Return the plan of a run, or raise ConfigError. `hosts[0]` is the supervisor's machine."""
    if any(host.devices for host in hosts):
        return _place_on_gpus(run, hosts)
    for key, node in (("inference", run.inference), ("trainer", run.trainer)):
        if node.devices is not None:
            _refuse(
                f"{key}.devices={node.devices}, but no GPU is visible on this machine: set "
                f"{key}.devices=null to use the CPU, or check `nvidia-smi -L` and the variable "
                "CUDA_VISIBLE_DEVICES"
            )
    return _place_on_cores(run, hosts)


def _place_on_cores(run: Run, hosts: Sequence[Host]) -> Plan:
    # Spread replicas over the hosts from the last to the first, ranks from the first to the last.
    last, group = len(hosts) - 1, run.inference.tensor_parallel_size
    num_replicas = (run.inference.replicas or 1) * run.starts_vllm
    num_ranks = run.trainer.ranks or 1
    replica_hosts = [last - i % len(hosts) for i in range(num_replicas)]
    rank_hosts = [rank * len(hosts) // num_ranks for rank in range(num_ranks)]
    inference = []
    for host in replica_hosts:
        # Leave one core for the other processes of the run.
        spare = hosts[host].cores - 1
        share = max(spare // (replica_hosts.count(host) * group), 1)
        inference.append(Place(host=host, devices=(), threads=hosts[host].num_threads or share))
    ranks = _rank_places(run, [(host, "") for host in rank_hosts], hosts)
    return Plan(inference=tuple(inference), ranks=ranks)


def _rank_places(run: Run, devices: Sequence[Device], hosts: Sequence[Host]) -> tuple[Place, ...]:
    """Return one `Place` per device, for one rank each. The device name "" means the host's CPU."""
    places: list[Place] = []
    for host, name in devices:
        visible = tuple(other for where, other in devices if where == host and other)
        num_local = sum(where == host for where, _ in devices)
        spare = hosts[host].cpus - run.starts_vllm  # vLLM's scheduler keeps one CPU busy
        places.append(
            Place(
                host=host,
                devices=(name,) if name else (),
                threads=run.trainer.num_threads or max(spare // num_local, 1),
                visible=visible,
                local_rank=sum(place.host == host for place in places),
            )
        )
    return tuple(places)


def _place_on_gpus(run: Run, hosts: Sequence[Host]) -> Plan:
    gpus = [(number, name) for number, host in enumerate(hosts) for name in host.devices]
    to_train, to_sample = _split_gpus(run, gpus)
    if not to_train or (run.starts_vllm and not to_sample):
        _refuse(
            f"{len(to_train)} of {len(gpus)} GPUs are for training and {len(to_sample)} for vLLM, "
            f"but each needs at least one: {_REMEDY}"
        )
    # With more ranks than batch_size, some rank would have no rollout to train on.
    num_ranks = run.trainer.ranks or min(len(to_train), run.batch_size)
    if num_ranks > len(to_train):
        _refuse(
            f"trainer.ranks={num_ranks} needs {num_ranks} GPUs, but only {len(to_train)} of "
            f"{len(gpus)} are for training: {_REMEDY}"
        )
    to_train = to_train[:num_ranks]
    inference = _replica_places(run, to_sample) if run.starts_vllm else ()
    used = {*to_train, *((place.host, name) for place in inference for name in place.devices)}
    return Plan(
        inference=inference,
        ranks=_rank_places(run, to_train, hosts),
        idle=tuple(gpu for gpu in gpus if gpu not in used),
    )


def _split_gpus(run: Run, gpus: list[Device]) -> tuple[list[Device], list[Device]]:
    """Return (GPUs of the trainer, GPUs of vLLM)."""
    train = _find_gpus("trainer", run.trainer.devices, gpus)
    if not run.starts_vllm:
        return (gpus if train is None else train), []
    sample = _find_gpus("inference", run.inference.devices, gpus)
    if train is None and sample is None:
        return (gpus, gpus) if len(gpus) == 1 else _default_split(run, gpus)
    if train is None or sample is None:
        others = [gpu for gpu in gpus if gpu not in (train or sample or ())]
        others = others or (gpus if len(gpus) == 1 else [])
        return (others if train is None else train), (others if sample is None else sample)
    return train, sample


def _default_split(run: Run, gpus: list[Device]) -> tuple[list[Device], list[Device]]:
    ranks, group = run.trainer.ranks, run.inference.tensor_parallel_size
    if ranks:
        return gpus[:ranks], gpus[ranks:]
    half = len(gpus) - len(gpus) // 2
    count = run.inference.replicas or max(half // group, 1)
    groups = list(_groups_on_one_host(gpus, group))[-count:]
    if not groups:  # no host has enough GPUs for a replica: `_replica_places` raises the error
        return gpus, gpus
    sample = [gpu for group in groups for gpu in group]
    return [gpu for gpu in gpus if gpu not in sample], sample


def _replica_places(run: Run, devices: list[Device]) -> tuple[Place, ...]:
    number, size = run.inference.replicas, run.inference.tensor_parallel_size
    groups = list(_groups_on_one_host(devices, size))
    if len(groups) < (number or 1):
        _refuse(
            f"inference.replicas={number or 1} with inference.tensor_parallel_size={size} needs "
            f"{(number or 1) * size} GPUs, {size} on one host for each replica, but vLLM's GPUs "
            f"({len(devices)}) suffice for only {len(groups)}: {_REMEDY}"
        )
    return tuple(
        Place(host=group[0][0], devices=tuple(name for _, name in group), threads=None)
        for group in groups[:number]
    )


def _groups_on_one_host(devices: Sequence[Device], size: int) -> Iterator[list[Device]]:
    for host in sorted({host for host, _ in devices}):
        local = [device for device in devices if device[0] == host]
        for begin in range(len(local) % size, len(local), size):
            yield local[begin : begin + size]


def _find_gpus(
    key: str, devices: Sequence[int | str] | None, gpus: list[Device]
) -> list[Device] | None:
    if devices is None:
        return None
    names = list(map(str, devices))
    available = list(dict.fromkeys(name for _, name in gpus))
    if missing := [name for name in names if name not in available]:
        _refuse(
            f"{key}.devices={names}, but no GPU {', '.join(missing)} is visible: choose from "
            f"{available}, or change the variable CUDA_VISIBLE_DEVICES"
        )
    return [(host, name) for host, name in gpus if name in names]


def _refuse(problem: str) -> NoReturn:
    raise ConfigError([problem])
