"""A machine as the supervisor sees it: it starts processes there and reads how they end.

The same call starts a process on any host. If a host is lost, its processes count as ended, and
every further start there raises HostLost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl.runtime.failure import RunFailed


class HostLost(RunFailed):
    """A machine of the run is gone with all its processes; the message is for the user."""


class Process(Protocol):
    """One process of a run with all its children."""

    name: str
    log: Path  # in the run's folder, which every host sees

    @property
    def group(self) -> int | None: ...  # the process group; None on another machine
    @property
    def returncode(self) -> int | None: ...  # None while it runs; negative: a signal, a lost host
    def tail(self) -> str: ...  # the end of its log, with the loss of its host if that happened
    def kill(self) -> None: ...  # ends it with all its children; its exit status stays readable
    def end(self) -> None: ...  # the same; may be called twice


@dataclass(frozen=True)
class Start:
    """What a host needs to start a process."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ends_on_term: bool = True  # whether a TERM ends it (see Child)


class Host(Protocol):
    """One machine, or a reserved share of it."""

    address: str  # by which the other hosts reach it
    devices: tuple[str, ...]  # its GPUs for this run, as CUDA_VISIBLE_DEVICES names them
    lost: HostLost | None  # why all its processes are gone, None while it works

    def start(self, start: Start) -> Process: ...  # in the supervisor's folder; may raise HostLost
    def free_port(self) -> int: ...  # a TCP port that was free a moment ago


@dataclass(frozen=True)
class Demand:
    """What a run needs of its hosts."""

    replicas: int  # vLLM servers that the run starts
    devices_per_replica: int  # GPUs of each, on one host
    ranks: int  # training processes


@dataclass(frozen=True)
class Hosts:
    """Where each process of a run is started."""

    here: Host  # the supervisor's own host; the rollouts process runs there
    replicas: Sequence[Host]  # the host of each vLLM
    ranks: Sequence[Host]  # the host of each rank; ranks of one host are neighbours

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank among those of its host."""
        return self.ranks[:rank].count(self.ranks[rank])
