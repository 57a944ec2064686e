"""What the supervisor knows of a machine: it starts parts there, and sees how they end.

A part may be started on any host by the same call, and a host that is lost is a part that ended
plus one exception, HostLost, for whoever wants to start another there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl.run.failure import RunFailed


class HostLost(RunFailed):
    """A machine of the run is gone, and all that ran there; the message is for the user."""


class HeadLost(RunFailed):
    """Whoever holds the machines together is gone, and all that runs there soon; for the user.

    Attributes:
        left_s: how long the parts there still run.

    """

    def __init__(self, message: str, left_s: float) -> None:
        super().__init__(message)
        self.left_s = left_s


class Part(Protocol):
    """One process of a run and everything it starts."""

    name: str
    log: Path  # in the run's folder, which every host sees

    @property
    def group(self) -> int | None:
        """Process group where it is one of this machine's."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit status, None while running; negative for a signal, and for a host that is lost."""
        ...

    def tail(self) -> str:
        """The end of its log, or why there will be none."""
        ...

    def kill(self) -> None:
        """End all of it; its exit status can still be asked for."""
        ...

    def end(self) -> None:
        """End all of it. Safe to call twice."""
        ...


class Host(Protocol):
    """One machine, or what was reserved on it.

    Attributes:
        address: what the other hosts reach it by.
        devices: the GPUs there are for us, as CUDA_VISIBLE_DEVICES names them.
        cores: how many logical CPUs there are for us.
        lost: why nothing of the run is there any more, None while it may be.

    """

    address: str
    devices: tuple[str, ...]
    cores: int
    lost: HostLost | None

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        ends_on_term: bool = True,
    ) -> Part:
        """Start a part, in the supervisor's working directory; `ends_on_term` as of a Child.

        Raises:
            HostLost: nothing can be started there any more.

        """
        ...

    def free_port(self) -> int:
        """Return a TCP port that nobody listened on a moment ago."""
        ...

    def end(self) -> None:
        """End all parts within one grace period."""
        ...


@dataclass(frozen=True)
class Demand:
    """What a run needs of its hosts.

    Attributes:
        replicas: vLLM servers that the run starts.
        devices_per_replica: GPUs of each, which lie on one host.
        ranks: processes that train.

    """

    replicas: int
    devices_per_replica: int
    ranks: int


@dataclass(frozen=True)
class Hosts:
    """Where each part of a run is started.

    Attributes:
        here: the supervisor's own; the rollouts process runs there.
        replicas: the host of each vLLM.
        ranks: the host of each rank; those of one host follow each other.

    """

    here: Host
    replicas: Sequence[Host]
    ranks: Sequence[Host]

    def local_rank(self, rank: int) -> int:
        """The number of a rank among those of its host."""
        return self.ranks[:rank].count(self.ranks[rank])
