"""Format the placement of a run, with its estimated memory, as a table for the terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rl.placement.budget import OTHER_PROCESSES, ProcessMemory, format_terms, gib, need_on_host
from rl.placement.memory import Need
from rl.placement.placement import Place, Plan
from rl.runtime.devices import Host


def plan_text(plan: Plan, processes: Sequence[ProcessMemory] | None, hosts: Sequence[Host]) -> str:
    """Return the table with notes. `processes` is None if the model's sizes are unknown."""
    entries: list[tuple[str, Place, Need | None]]
    if processes is None:
        entries = [("vLLM", place, None) for place in plan.inference]
        entries += [("trainer", place, None) for place in plan.ranks]
    else:
        entries = [(process.name, process.place, process.need) for process in processes]
    lines = [("", "runs on", "GiB", "at its peak")]
    for (name, host, where, size), group in groupby(entries, _line_key):
        places = [place for _, place, _ in group]
        devices = " ".join(device for place in places for device in place.devices)
        at = f"host {host}, " * (len(hosts) > 1) + (f"GPU {devices}" if devices else where)
        lines.append((f"{name} x{len(places)}" if len(places) > 1 else name, at, *size))
    # On GPUs the GiB column shows only GPU memory, which supervisor and rollouts process never use.
    if processes is not None and not plan.on_gpus:
        where = "host 0" if len(hosts) > 1 else ""
        lines.append(("others", where, gib(OTHER_PROCESSES), "rollouts process, supervisor"))
    a, b, c = (max(len(line[i]) for line in lines) for i in range(3))
    text = [f"{w:<{a}}  {x:<{b}}  {y:>{c}}  {z}".rstrip() for w, x, y, z in lines]
    return "\n".join([*text, *_notes(plan, processes or (), hosts)])


def _line_key(entry: tuple[str, Place, Need | None]) -> tuple[str, int, str, tuple[str, str]]:
    name, place, need = entry
    threads = place.threads or 0
    where = "" if place.devices else f"{threads} thread{'s' * (threads != 1)}"
    if need is None:
        return name, place.host, where, ("?", "")
    text = ", ".join(format_terms(need.device or need.host))
    return name, place.host, where, (gib(need.on_device or need.on_host), text)


def _notes(plan: Plan, processes: Sequence[ProcessMemory], hosts: Sequence[Host]) -> Iterator[str]:
    if processes:
        needs = [need_on_host(processes, number) for number in range(len(hosts))]
        left = [(host.memory or 0) - need for host, need in zip(hosts, needs, strict=True)]
        number = left.index(min(left))
        host, taken = hosts[number], needs[number]
        name = f"host {number}, the fullest," if len(hosts) > 1 else "host"
        total = f" of {gib(host.memory)}" if host.memory else ""
        free = host.free_memory
        now = f"; {gib(free)} GiB are free now" if free and taken > free else ""
        sizes = {one.device_memory for one in hosts if one.device_memory}
        least = "at least " if len(sizes) > 1 else ""
        cards = f"; each GPU has {least}{gib(min(sizes))} GiB" if sizes else ""
        yield f"{name} needs {gib(taken)}{total} GiB{now}{cards}"
        if host.memory and taken > host.memory:  # `fit_memory` allows a small excess
            yield "the run may fail: the estimate exceeds the memory (estimates are up to 15 % off)"
    if plan.idle:
        names = " ".join(name for _, name in plan.idle)
        yield f"unused: GPU {names} (set trainer.ranks=null and inference.replicas=null to use all)"
