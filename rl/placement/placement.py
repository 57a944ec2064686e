"""Which devices and cores each process of a run gets, or a sentence why it cannot and what would.

    GPUs of all hosts    trainer ranks on the first, one each, vLLM's replicas on the last
    one GPU              both share it (rl/placement/memory.py: how much each may take)
    no GPU               both compute on cores: vLLM on all but one, the ranks on all but one

A function of its arguments alone: nothing is asked of the machine here. Counts that are null follow
the devices: half of them train, and vLLM serves on the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rl.config.facts import is_external, is_imitator
from rl.config.schema import ConfigError
from rl.run.devices import Host

Device = tuple[int, str]  # number of the host, name on it as in CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one process has to itself.

    Attributes:
        host: its number among the hosts.
        devices: what it computes on; none on a CPU.
        threads: CPU threads it may compute with; None: as many as it likes.
        visible: devices it can see: on a GPU a rank sees those of all ranks of its host, as NCCL
            likes it best, and `local_rank` says which one is its own.
        local_rank: of a trainer rank, counted within its host.

    """

    host: int
    devices: tuple[str, ...]
    threads: int | None
    visible: tuple[str, ...] = ()
    local_rank: int | None = None

    def environment(self) -> dict[str, str]:
        """Return what says so to the process."""
        visible = self.visible or self.devices
        said = {
            "CUDA_VISIBLE_DEVICES": ",".join(visible) or None,
            "OMP_NUM_THREADS": self.threads,
            "LOCAL_RANK": self.local_rank,
        }
        return {name: str(value) for name, value in said.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The places of a run's processes; `inference` is empty where no vLLM is started."""

    inference: tuple[Place, ...]
    ranks: tuple[Place, ...]
    idle: tuple[Device, ...] = ()

    @property
    def on_gpus(self) -> bool:
        """Whether anything computes on a GPU."""
        return any(place.devices for place in (*self.inference, *self.ranks))

    def is_shared(self, place: Place) -> bool:
        """Whether another part computes on a device of this place."""
        others = self.ranks if place in self.inference else self.inference
        return any(
            other.host == place.host and set(other.devices) & set(place.devices) for other in others
        )


@dataclass(frozen=True)
class _Wish:
    """What a configuration says; null counts follow the devices."""

    replicas: int | None
    group: int  # devices of one replica
    ranks: int | None
    most_ranks: int  # more would have no rollout to train on
    inference: Sequence[str] | None
    trainer: Sequence[str] | None
    threads: int | None
    samples: bool  # whether vLLM is ours to start


def placement(config: Mapping[str, Any], hosts: Sequence[Host]) -> Plan:
    """Return the places of the processes that a run's configuration asks for.

    Args:
        config: of a run, resolved and checked.
        hosts: what each machine offers; the supervisor's own comes first.

    Raises:
        ConfigError: it does not fit; the sentence says what would.

    """
    wish = _wish_of(config)
    if any(host.devices for host in hosts):
        return _on_devices(wish, hosts)
    for key, devices in (("inference", wish.inference), ("trainer", wish.trainer)):
        if devices is not None:
            _refuse(
                f"{key}.devices={_listed(devices)}, but no GPU is to be seen here: leave it null "
                "to compute on the CPU (nvidia-smi -L lists what the driver has, "
                "CUDA_VISIBLE_DEVICES hides)"
            )
    return _on_cores(wish, hosts)


def _wish_of(config: Mapping[str, Any]) -> _Wish:
    inference, trainer = config["inference"] or {}, config["trainer"]

    def names(node: Mapping[str, Any]) -> list[str] | None:
        devices = node.get("devices")
        return None if devices is None else [str(device) for device in devices]

    return _Wish(
        replicas=inference.get("replicas"),
        group=inference.get("tensor_parallel_size", 1),
        ranks=trainer["ranks"],
        most_ranks=config["batch_size"],
        inference=names(inference),
        trainer=names(trainer),
        threads=trainer["num_threads"],
        samples=not is_imitator(config["sampler"]["_target_"]) and not is_external(inference),
    )


def _on_cores(wish: _Wish, hosts: Sequence[Host]) -> Plan:
    """Replicas from the last host on, ranks from the first: apart where there are several hosts."""
    last = len(hosts) - 1
    num_replicas, num_ranks = (wish.replicas or 1) * wish.samples, wish.ranks or 1
    of_replicas = [last - i % len(hosts) for i in range(num_replicas)]
    of_ranks = [rank * len(hosts) // num_ranks for rank in range(num_ranks)]
    inference = []
    for host in of_replicas:
        # vLLM binds a core to a thread and leaves one to the rest of the run.
        spare = hosts[host].cores - 1
        share = max(spare // (of_replicas.count(host) * wish.group), 1)
        inference.append(Place(host=host, devices=(), threads=hosts[host].num_threads or share))
    return Plan(inference=tuple(inference), ranks=_ranks(wish, [(h, "") for h in of_ranks], hosts))


def _ranks(wish: _Wish, devices: Sequence[Device], hosts: Sequence[Host]) -> tuple[Place, ...]:
    """A rank for each device; without a name it is its host's CPU."""
    places: list[Place] = []
    for host, name in devices:
        visible = tuple(other for where, other in devices if where == host and other)
        num_local = sum(where == host for where, _ in devices)
        spare = hosts[host].cpus - wish.samples  # vLLM, or whoever asks it, keeps one busy
        places.append(
            Place(
                host=host,
                devices=(name,) if name else (),
                threads=wish.threads or max(spare // num_local, 1),
                visible=visible,
                local_rank=sum(place.host == host for place in places),
            )
        )
    return tuple(places)


def _on_devices(wish: _Wish, hosts: Sequence[Host]) -> Plan:
    there = [(number, name) for number, host in enumerate(hosts) for name in host.devices]
    to_train, to_sample = _shares(wish, there)
    num_ranks = wish.ranks or min(len(to_train), wish.most_ranks)
    if num_ranks > len(to_train):
        _refuse(
            f"trainer.ranks={num_ranks}, but {_gpus(len(to_train))} for training, and each rank "
            f"needs one to itself: {_remedy(wish, there)}"
        )
    to_train = to_train[:num_ranks]
    inference = _replicas(wish, to_sample, there) if wish.samples else ()
    used = {*to_train, *((place.host, name) for place in inference for name in place.devices)}
    return Plan(
        inference=inference,
        ranks=_ranks(wish, to_train, hosts),
        idle=tuple(device for device in there if device not in used),
    )


def _shares(wish: _Wish, there: list[Device]) -> tuple[list[Device], list[Device]]:
    """The devices to train on and those to sample on, where nothing is said half and half."""
    train = _named("trainer", wish.trainer, there)
    sample = _named("inference", wish.inference, there) if wish.samples else []
    if not wish.samples:
        return train or there, []
    if train is None and sample is None:
        return (there, there) if len(there) == 1 else _apart(wish, there)
    if train is None or sample is None:
        rest = [device for device in there if device not in (train or sample or ())]
        rest = rest or (there if len(there) == 1 else [])
        if not rest:
            given, other = ("inference", "trainer") if train is None else ("trainer", "inference")
            _refuse(
                f"{given}.devices names all {len(there)} GPUs and leaves none to {other}: name "
                f"{other}.devices, too (a GPU in both lists is shared)"
            )
        return (train or rest), (sample or rest)
    return train, sample


def _apart(wish: _Wish, there: list[Device]) -> tuple[list[Device], list[Device]]:
    """Ranks on the first devices and vLLM on the last, each on its own."""
    if wish.ranks:
        train, sample = there[: wish.ranks], there[wish.ranks :]
    else:
        half = len(there) - len(there) // 2
        count = wish.replicas or max(half // wish.group, 1)
        groups = list(_groups(there, wish.group))[-count:]
        if not groups:  # which is said where replicas get their devices
            return there, there
        sample = [device for group in groups for device in group]
        train = [device for device in there if device not in sample]
    if not train or not sample:
        who, whom = (f"trainer.ranks={wish.ranks}", "vLLM") if train else (_vllm(wish), "training")
        _refuse(f"{who} leaves none of {len(there)} GPUs to {whom}: {_remedy(wish, there)}")
    return train, sample


def _replicas(wish: _Wish, devices: list[Device], there: list[Device]) -> tuple[Place, ...]:
    """vLLM's groups of devices; none goes from one host to another."""
    groups = list(_groups(devices, wish.group))
    if len(groups) < (wish.replicas or 1):
        _refuse(
            f"{_vllm(wish)} needs {(wish.replicas or 1) * wish.group} GPUs, "
            f"{wish.group} at a time on one host, but {_gpus(len(devices))} for vLLM, with room "
            f"for {len(groups)} such replica{'s' * (len(groups) != 1)}: {_remedy(wish, there)}"
        )
    return tuple(
        Place(host=group[0][0], devices=tuple(name for _, name in group), threads=None)
        for group in groups[: wish.replicas]
    )


def _groups(devices: Sequence[Device], size: int) -> Iterator[list[Device]]:
    for host in sorted({host for host, _ in devices}):
        local = [device for device in devices if device[0] == host]
        for begin in range(len(local) % size, len(local), size):
            yield local[begin : begin + size]


def _named(part: str, names: Sequence[str] | None, there: list[Device]) -> list[Device] | None:
    """The devices with these names, on whichever hosts have them."""
    if names is None:
        return None
    known = list(dict.fromkeys(name for _, name in there))
    key = f"{part}.devices={_listed(names)}"
    if not names:
        _refuse(f"{key} leaves it no GPU: name some of {_listed(known)}, or use null")
    if len(set(names)) < len(names):
        _refuse(f"{key} names a GPU twice: name each once")
    if missing := [name for name in names if name not in known]:
        _refuse(
            f"{key}, but there is no GPU {', '.join(missing)} to be seen: choose from "
            f"{_listed(known)} (CUDA_VISIBLE_DEVICES hides the others)"
        )
    return [(host, name) for host, name in there if name in names]


def _remedy(wish: _Wish, there: list[Device]) -> str:
    """What fits on these devices."""
    largest = max(sum(host == h for h, _ in there) for host, _ in there)
    group = min(wish.group, largest if len(there) > largest else max(len(there) // 2, 1))
    half = len(there) - len(there) // 2
    num_replicas = max(half // group, 1)
    num_ranks = max(len(there) - num_replicas * group, 1)
    smaller = f"inference.tensor_parallel_size={group} " if group < wish.group else ""
    named = " and no list of devices" if wish.inference or wish.trainer else ""
    return (
        f"use {smaller}trainer.ranks={num_ranks} inference.replicas={num_replicas}{named}, or "
        "inference.devices and trainer.devices (a GPU in both lists is shared)"
    )


def _vllm(wish: _Wish) -> str:
    size = f"inference.tensor_parallel_size={wish.group}"
    return f"inference.replicas={wish.replicas} with {size}" if wish.replicas else size


def _gpus(count: int) -> str:
    return f"there {'is' if count == 1 else 'are'} {count} GPU{'s' * (count != 1)}"


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def _refuse(sentence: str) -> NoReturn:
    raise ConfigError([sentence])
