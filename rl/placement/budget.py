"""Whether a plan fits the memory of its hosts and GPUs; what one that fits settles.

A part that cannot fit is refused with the arithmetic, and only where it could not even if 15 % less
would do, as far as estimates are off (docs/scaling.md). What is free just now is not asked: another
program may end. The page says where a plan takes more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rl.config.schema import ConfigError
from rl.model.shape import GIB, Shape
from rl.placement.placement import Place, Plan, placement
from rl.placement.remedies import changed, remedies, typed
from rl.placement.trainer_memory import Bytes, Need, trainer_need
from rl.placement.vllm_memory import row_bytes, utilization, vllm_need
from rl.run.devices import Host

OTHERS = 0.35 * GIB  # the rollouts process and the supervisor, on the first host
_LEAST = 0.85  # of an estimate
_LEFT_FREE = 0.03  # of a shared GPU
_UNKNOWN_SHARE = 0.45  # of a shared GPU whose size nobody knows


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process, or the group of one vLLM, and the memory it takes."""

    name: str
    place: Place
    need: Need


def parts_of(config: Mapping[str, Any], plan: Plan, shape: Shape) -> list[Part]:
    """Return what every process of a plan takes."""
    vllm = [
        Part(
            name="vLLM",
            place=place,
            need=vllm_need(config, shape, on_gpu=bool(place.devices)),
        )
        for place in plan.inference
    ]
    size = len(plan.ranks)
    ranks = [
        Part(
            name="trainer",
            place=place,
            need=trainer_need(
                config, shape, ranks=size, first=rank == 0, on_gpu=bool(place.devices)
            ),
        )
        for rank, place in enumerate(plan.ranks)
    ]
    return [*vllm, *ranks]


def fitted(
    config: Mapping[str, Any], plan: Plan, shape: Shape, hosts: Sequence[Host]
) -> dict[str, Any]:
    """Return the configuration with what vLLM may take, once everything has its room.

    Raises:
        ConfigError: something has none.

    """
    inference = dict(config["inference"])
    if plan.inference and isinstance(inference.get("args"), Mapping):
        if not plan.inference[0].devices:
            inference["cpu_kv_cache_gib"] = _cache_gib(config, shape)
        elif share := _share(config, plan, shape, hosts):
            args = {"gpu_memory_utilization": share, **inference["args"]}
            inference["args"] = args
    config = {**config, "inference": inference}
    parts = parts_of(config, plan, shape)
    _check_devices(parts, hosts, config)
    for number, host in enumerate(hosts):
        taken = memory_of_host(parts, number)
        if host.memory is not None and _LEAST * taken > host.memory:
            local = [part for part in parts if part.place.host == number]
            largest = max(local, key=lambda part: part.need.on_host)
            raise ConfigError(
                [
                    f"this run takes {gib(taken)} GiB, and the machine has {gib(host.memory)}: "
                    f"{arithmetic(largest.name, largest.need.host)}. "
                    f"{_what_fits(config, shape, hosts, number)}"
                ]
            )
    return config


def _what_fits(config: Mapping[str, Any], shape: Shape, hosts: Sequence[Host], full: int) -> str:
    """The sentence that says what makes room on the machines, of which this one is too full."""

    def taken(trial: Mapping[str, Any], host: int) -> float:
        return memory_of_host(parts_of(trial, placement(trial, hosts), shape), host)

    def fits(trial: Mapping[str, Any]) -> bool:
        return all(
            host.memory is None or _LEAST * taken(trial, number) <= host.memory
            for number, host in enumerate(hosts)
        )

    changes, enough = remedies(config, shape, fits)
    if enough:
        return f"Use {typed(changes)}"
    smaller = "se a smaller model, a lower max_seq_len or a larger machine"
    if not changes:
        return f"U{smaller}"
    return f"Even {typed(changes)} takes {gib(taken(changed(config, changes), full))}: u{smaller}"


def memory_of_host(parts: Sequence[Part], host: int) -> float:
    """Return the bytes that a plan takes of a machine."""
    local = sum(part.need.on_host for part in parts if part.place.host == host)
    return local + OTHERS * (host == 0)


def _cache_gib(config: Mapping[str, Any], shape: Shape) -> int:
    """GiB of vLLM's cache on CPU: at least what one row needs."""
    needed = shape.cache_gib(config["max_seq_len"], config["model"]["dtype"])
    chosen = config["inference"].get("cpu_kv_cache_gib") or needed
    if chosen < needed:
        raise ConfigError(
            [
                f"inference.cpu_kv_cache_gib={chosen}, but the keys and values of one row of "
                f"max_seq_len={config['max_seq_len']} take "
                f"{row_bytes(config, shape) / GIB:.1f} GiB: raise it to {needed}, use null, or "
                "lower max_seq_len"
            ]
        )
    return chosen


def _share(
    config: Mapping[str, Any], plan: Plan, shape: Shape, hosts: Sequence[Host]
) -> float | None:
    """The part of a GPU that vLLM may take beside a rank; None where it has its own."""
    shared = [place for place in plan.inference if plan.is_shared(place)]
    if not shared:
        return None
    size = min((h.device_memory for h in hosts if h.device_memory), default=None)
    if size is None:
        return _UNKNOWN_SHARE
    rank = trainer_need(config, shape, ranks=len(plan.ranks), first=True, on_gpu=True)
    least = vllm_need(config, shape, on_gpu=True)
    left = 1 - rank.on_device / size - _LEFT_FREE
    return min(round(max(left, least.on_device / size + 0.01), 2), 1.0)


def _check_devices(parts: Sequence[Part], hosts: Sequence[Host], config: Mapping[str, Any]) -> None:
    for place in dict.fromkeys(part.place for part in parts):
        size = hosts[place.host].device_memory
        if size is None:
            continue
        for device in place.devices:
            there = [p for p in parts if p.place.host == place.host and device in p.place.devices]
            needs = {part.name: part.need for part in there}
            taken = sum(need.on_device for need in needs.values())
            room = size * utilization(config["inference"]) if set(needs) == {"vLLM"} else size
            if _LEAST * taken > room:
                both = Bytes()
                for name, need in needs.items():
                    both |= {f"{name}'s {key}": v for key, v in need.device.items()}
                sums = "; ".join(arithmetic(n, need.device) for n, need in needs.items())
                _refuse(
                    f"GPU {device} has {gib(room)} GiB for {' and '.join(needs)}, which need "
                    f"{gib(taken)}: {sums}",
                    both,
                    config,
                )


def arithmetic(name: str, need: Bytes) -> str:
    """Return `trainer 10.3 = weights 0.8 + optimizer 4.9 + ...`, the largest first."""
    terms = sorted(need.items(), key=lambda item: -item[1])
    shown = " + ".join(f"{key} {gib(value)}" for key, value in terms if value >= 0.05 * GIB)
    return f"{name} {gib(sum(need.values()))} = {shown}"


def gib(value: float) -> str:
    """Return bytes in GiB."""
    return f"{value / GIB:.1f}"


def _refuse(sentence: str, need: Bytes, config: Mapping[str, Any]) -> NoReturn:
    raise ConfigError([f"{sentence}. Use {' or '.join(_remedies(need, config))}"])


def _remedies(need: Bytes, config: Mapping[str, Any]) -> Iterator[str]:
    """What makes the largest part of it smaller."""

    def of(*names: str) -> float:
        return sum(value for key, value in need.items() if key.endswith(names))

    passes, states = of("activations", "logits"), of("gradients", "optimizer", "step")
    if passes > states:
        if not config["trainer"]["gradient_checkpointing"]:
            yield "trainer.gradient_checkpointing=true"
        yield "a lower trainer.tokens_per_micro_batch"
        if of("logits") > of("activations"):
            yield "a lower trainer.logprob_chunk"
    elif states > of("weights", "key-values"):
        if config["adapter"].get("rank") is None:
            yield "adapter=lora"
        yield "deepspeed=zero3 with more trainer.ranks"
    elif of("key-values") > of("weights"):
        yield "a lower max_seq_len"
    else:
        yield "a smaller model"
        yield "a larger inference.tensor_parallel_size"
