"""The plan and its memory as a few lines for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from rl.model.shape import GIB
from rl.placement.budget import OTHERS, ProcessMemory, gib, memory_of_host
from rl.placement.placement import Place, Plan
from rl.runtime.devices import Host

_WIDTH = 79
_SHOWN = 0.05 * GIB  # smaller terms are left out


def plan_page(plan: Plan, processes: Sequence[ProcessMemory] | None, hosts: Sequence[Host]) -> str:
    """Return a line for each group of similar processes, and one for the fullest machine.

    Args:
        plan: where every process runs.
        processes: the memory of each; None where the model's sizes are unknown.
        hosts: what each machine has.

    """
    lines = [("", "runs on", "GiB", "at its peak")]
    if processes is None:
        places = [("vLLM", place) for place in plan.inference]
        places += [("trainer", place) for place in plan.ranks]
        lines += [
            (_counted(name, list(group)), where, "?", "")
            for (name, where), group in groupby(places, lambda it: (it[0], _where(it[1], hosts)))
        ]
    else:
        lines += _process_lines(processes, hosts)
        if not plan.on_gpus:  # else the column shows the memory of GPUs
            where = "host 0" if len(hosts) > 1 else ""
            lines.append(("others", where, gib(OTHERS), "rollouts process, supervisor"))
    columns = [max(len(line[i]) for line in lines) for i in range(3)]
    text = []
    for a, b, c, terms in lines:
        start = f"{a:<{columns[0]}}  {b:<{columns[1]}}  {c:>{columns[2]}}  "
        while terms and len(start + terms) > _WIDTH:  # drop the smallest term
            terms = terms.rpartition(", ")[0]
        text.append((start + terms).rstrip())
    return "\n".join([*text, *_notes(plan, processes or (), hosts)])


def _process_lines(
    processes: Sequence[ProcessMemory], hosts: Sequence[Host]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield one line for neighbours with the same name and need."""

    def kind(process: ProcessMemory) -> tuple[str, int, int, str]:
        place = process.place
        return process.name, place.host, len(place.devices), gib(_taken(process))

    for _, group in groupby(processes, kind):
        members = list(group)
        devices = [device for process in members for device in process.place.devices]
        first = members[0]
        where = _where(first.place, hosts, devices)
        need = first.need.device or first.need.host
        terms = sorted(need.items(), key=lambda item: -item[1])
        terms = [f"{name} {gib(value)}" for name, value in terms if value >= _SHOWN]
        yield _counted(first.name, members), where, gib(_taken(first)), ", ".join(terms)


def _taken(process: ProcessMemory) -> float:
    return process.need.on_device or process.need.on_host


def _counted(name: str, members: Sequence[object]) -> str:
    return f"{name} x{len(members)}" if len(members) > 1 else name


def _where(place: Place, hosts: Sequence[Host], devices: Sequence[str] = ()) -> str:
    devices = devices or place.devices
    host = f"host {place.host}, " if len(hosts) > 1 else ""
    if devices:
        return f"{host}GPU {_spans(devices)}"
    threads = place.threads or 0
    return f"{host}{threads} thread{'s' * (threads != 1)}"


def _spans(names: Sequence[str]) -> str:
    """Return `0-3` for names that are consecutive numbers, else the names."""
    is_row = all(name.isdigit() for name in names) and all(
        int(b) - int(a) == 1 for a, b in pairwise(names)
    )
    return f"{names[0]}-{names[-1]}" if is_row and len(names) > 2 else " ".join(names)


def _notes(plan: Plan, processes: Sequence[ProcessMemory], hosts: Sequence[Host]) -> Iterator[str]:
    """Yield the memory of the fullest machine, and the GPUs that the run does not use."""
    taken = {number: memory_of_host(processes, number) for number in range(len(hosts)) if processes}
    if taken:
        number = max(taken, key=lambda number: taken[number])
        host, name = hosts[number], f"host {number}, the fullest" if len(hosts) > 1 else "memory"
        total = f" of {gib(host.memory)}" if host.memory else ""
        free = host.free_memory
        now = f", of which {gib(free)} are free now" if free and taken[number] > free else ""
        cards = f"; each GPU has {gib(host.device_memory)}" if host.device_memory else ""
        yield f"{name}: {gib(taken[number])}{total} GiB{now}{cards}"
        if host.memory and taken[number] > host.memory:  # `fitted` refuses much larger excesses
            yield "more than there is: it may fail (estimates are up to 15 % off, so it is allowed)"
    if plan.idle:
        names = _spans([name for _, name in plan.idle])
        yield f"idle: GPU {names} (trainer.ranks=null inference.replicas=null use them all)"
