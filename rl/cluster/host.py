"""Interfaces of hosts and of their processes.

A host is this machine or a bundle of a Ray cluster. If a host cannot be reached any more, its
processes count as ended. LocalHost and RayHost implement the interface Host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl.runtime.child import Start
from rl.runtime.failure import RunFailed


class HostLost(RunFailed):
    """The error raised if a host, with all its processes, cannot be reached any more."""


class Process(Protocol):
    name: str
    log: Path  # path in the run folder, which every host can read

    @property
    def group(self) -> int | None: ...  # process group id; None for a process on another host
    @property
    def returncode(self) -> int | None: ...  # None while running; < 0 if killed or on a lost host
    def tail(self) -> str: ...  # the last lines of the log, and the error if the host is lost
    def kill(self) -> None: ...  # end the process and its children; `returncode` stays readable
    def end(self) -> None: ...  # like kill, but `returncode` may become None; may be called twice


class Host(Protocol):
    """The interface of this machine, or of a bundle that Ray has reserved on some machine."""

    address: str  # the IP address that processes on other hosts connect to
    devices: tuple[str, ...]  # the run's GPUs on this host, as CUDA_VISIBLE_DEVICES names them
    lost: HostLost | None  # the error if this host is lost, else None

    def start(self, start: Start) -> Process: ...  # raises HostLost if the host is lost
    def free_port(self) -> int: ...  # a TCP port that is free at the time of the call


@dataclass(frozen=True)
class Demand:
    replicas: int  # number of vLLM servers that the run starts
    devices_per_replica: int  # GPUs per vLLM server, all on the same host
    ranks: int  # number of training processes, summed over all hosts


@dataclass(frozen=True)
class Hosts:
    here: Host  # the host of the supervisor and of the rollouts process
    replicas: Sequence[Host]  # the host of each vLLM server
    ranks: Sequence[Host]  # the host of each rank; ranks of one host are consecutive

    def local_rank(self, rank: int) -> int:
        return self.ranks[:rank].count(self.ranks[rank])
