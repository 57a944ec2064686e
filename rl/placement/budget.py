"""Check that a run fits into the memory of hosts and GPUs, and compute vLLM's share of a GPU.

Estimates are up to 15 % off (docs/scaling.md). So `fit_memory` refuses a run only if 85 % of the
estimate exceeds a host's memory. The limit of a GPU is stricter, 93 %, because a GPU cannot swap.
`fit_memory` ignores memory that other programs use, because these programs may end soon.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.config.schema import ConfigError, Run
from rl.model.shape import GIB, Shape
from rl.placement.memory import Bytes, Need, gpu_utilization, trainer_need, vllm_need
from rl.placement.placement import Place, Plan
from rl.runtime.devices import Host

OTHER_PROCESSES = 0.35 * GIB  # memory of the rollouts process and the supervisor, on host 0
_REFUSED_SHARE = 0.85  # a run is refused if this share of the estimate exceeds a host's memory
_REFUSED_GPU_SHARE = 0.93  # a run is refused if this share of the estimate exceeds a GPU's memory
_LEFT_FREE = 0.03  # fraction of a GPU's memory that stays free if trainer and vLLM share the GPU
_UNKNOWN_SHARE = 0.45  # vLLM's fraction of a shared GPU whose memory size is unknown
_REMEDIES = (
    "Lower trainer.tokens_per_micro_batch, trainer.logprob_chunk or max_seq_len, or set "
    "trainer.gradient_checkpointing=true or adapter=lora. If ranks or replicas share a machine's "
    "memory, lower trainer.ranks or inference.replicas. On GPUs, use "
    "deepspeed=zero3_offload_optimizer, or raise inference.tensor_parallel_size, or trainer.ranks "
    "with deepspeed=zero3. `python plan.py` estimates the memory with other options"
)


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    name: str
    place: Place
    need: Need


def process_memory(run: Run, plan: Plan, shape: Shape) -> list[ProcessMemory]:
    needs = [
        ("vLLM", place, vllm_need(run, shape, on_gpu=bool(place.devices)))
        for place in plan.inference
    ]
    for rank, place in enumerate(plan.ranks):
        first, on_gpu = rank == 0, bool(place.devices)
        need = trainer_need(run, shape, ranks=len(plan.ranks), first=first, on_gpu=on_gpu)
        needs.append(("trainer", place, need))
    return [ProcessMemory(name=name, place=place, need=need) for name, place, need in needs]


def fit_memory(run: Run, plan: Plan, shape: Shape, hosts: Sequence[Host]) -> Run:
    """Return the run with vLLM's memory options. Raise ConfigError if the run does not fit."""
    run = _with_vllm_memory(run, plan, shape, hosts)
    for problem in _problems(process_memory(run, plan, shape), hosts, run):
        raise ConfigError([f"{problem}. {_REMEDIES}"])
    return run


def _with_vllm_memory(run: Run, plan: Plan, shape: Shape, hosts: Sequence[Host]) -> Run:
    if not plan.inference or run.inference.args is None:
        return run
    if not plan.inference[0].devices:
        return run.with_values({"inference.cpu_kv_cache_gib": _cache_gib(run, shape)})
    if share := _vllm_share(run, plan, shape, hosts):
        args = {"gpu_memory_utilization": share, **run.inference.args}
        return run.with_values({"inference.args": args})
    return run


def gpu_excess(
    processes: Sequence[ProcessMemory], hosts: Sequence[Host], run: Run, share: float = 1.0
) -> Iterator[str]:
    """Yield a message for each GPU whose usable memory is below `share` times the estimate."""
    used = [(place.host, gpu) for place in (p.place for p in processes) for gpu in place.devices]
    for host, device in dict.fromkeys(used):
        if (size := hosts[host].device_memory) is None:
            continue
        needs = {
            process.name: process.need
            for process in processes
            if process.place.host == host and device in process.place.devices
        }
        taken = sum(need.on_device for need in needs.values())
        limit = size * gpu_utilization(run.inference.args) if set(needs) == {"vLLM"} else size
        if share * taken > limit:
            sums = "; ".join(format_sum(name, need.device) for name, need in needs.items())
            yield (
                f"GPU {device} has {gib(limit)} GiB for {' and '.join(needs)}, but "
                f"{gib(taken)} GiB are needed: {sums}"
            )


def _problems(processes: Sequence[ProcessMemory], hosts: Sequence[Host], run: Run) -> Iterator[str]:
    yield from gpu_excess(processes, hosts, run, _REFUSED_GPU_SHARE)
    for number, host in enumerate(hosts):
        taken = need_on_host(processes, number)
        if host.memory is not None and _REFUSED_SHARE * taken > host.memory:
            local = [process for process in processes if process.place.host == number]
            largest = max(local, key=lambda process: process.need.on_host)
            yield (
                f"host {number} has {gib(host.memory)} GiB of memory, but its processes need "
                f"{gib(taken)} GiB. Largest process: {format_sum(largest.name, largest.need.host)}"
            )


def need_on_host(processes: Sequence[ProcessMemory], host: int) -> float:
    local = sum(process.need.on_host for process in processes if process.place.host == host)
    return local + OTHER_PROCESSES * (host == 0)


def _cache_gib(run: Run, shape: Shape) -> int:
    needed = shape.cache_gib(run.max_seq_len, run.model.dtype)
    chosen = run.inference.cpu_kv_cache_gib or needed
    if chosen < needed:
        row = shape.row_cache_bytes(run.max_seq_len, run.model.dtype)
        problem = (
            f"inference.cpu_kv_cache_gib={chosen}, but the keys and values of one row of "
            f"max_seq_len={run.max_seq_len} need {row / GIB:.1f} GiB: set "
            f"inference.cpu_kv_cache_gib={needed} or null, or lower max_seq_len"
        )
        raise ConfigError([problem])
    return chosen


def _vllm_share(run: Run, plan: Plan, shape: Shape, hosts: Sequence[Host]) -> float | None:
    """Return the fraction of a GPU's memory for vLLM, or None if vLLM shares no GPU with a rank.

    Raise ConfigError if the fraction that the user set leaves too little memory for the rank.
    """
    if not any(plan.is_shared(place) for place in plan.inference):
        return None
    size = min((h.device_memory for h in hosts if h.device_memory), default=None)
    if size is None:
        return _UNKNOWN_SHARE
    rank = trainer_need(run, shape, ranks=len(plan.ranks), first=True, on_gpu=True)
    vllm = vllm_need(run, shape, on_gpu=True).device
    push = vllm.pop("push")  # vLLM allocates copies of pushed weights outside its fraction
    taken, chosen = rank.on_device + push, gpu_utilization(run.inference.args, 0.0)
    share = 1 - taken / size - _LEFT_FREE
    share = min(round(max(share, sum(vllm.values()) / size + 0.01), 2), 1.0)
    if chosen and _REFUSED_GPU_SHARE * taken > (1 - chosen) * size:
        problem = (
            f"inference.args.gpu_memory_utilization={chosen:g} reserves {gib(chosen * size)} of "
            f"{gib(size)} GiB for vLLM, but the trainer on the same GPU needs {gib(taken)} GiB: "
            f"remove this option, or set it to at most {share:g}"
        )
        raise ConfigError([problem])
    return share


def format_sum(name: str, need: Bytes) -> str:
    """Return GiB by purpose as text, the largest first: `trainer 10.3 = optimizer 4.8 + ...`."""
    return f"{name} {gib(sum(need.values()))} = {' + '.join(format_terms(need))}"


def format_terms(need: Bytes) -> list[str]:
    largest_first = sorted(need.items(), key=lambda item: -item[1])
    return [f"{key} {gib(value)}" for key, value in largest_first if value >= 0.05 * GIB]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"
