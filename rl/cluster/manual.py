"""Processes that the user starts by hand: with srun, torchrun, or in another terminal.

The supervisor prints one command for each. From then on it sees only what the processes write into
the run's folder. It cannot end them. Instead it writes a file when the run is over, and they end
themselves (rl/runtime/stop_request.py).
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.cluster.host import Demand, HostLost, Hosts
from rl.runtime.child import Reaper, last_lines
from rl.runtime.files import write_whole
from rl.runtime.folder import RunFolder
from rl.runtime.network import free_port, own_address
from rl.runtime.status import phase_of, read_statuses
from rl.runtime.text import say

_SHARES = (
    "Processes on the same host share it by what you put before the command: CUDA_VISIBLE_DEVICES, "
    "or OMP_NUM_THREADS where there is no GPU; LOCAL_RANK counts the ranks of one host"
)


class ManualProcess:
    """A process of which the supervisor sees only the files."""

    group: None = None  # it is on another machine

    def __init__(self, run_folder: RunFolder, name: str, log: Path) -> None:
        self._run_folder, self.name, self.log = run_folder, name, log

    @property
    def returncode(self) -> int | None:
        """0 when its status is done, 1 when it has reported a failure."""
        if (self._run_folder.failures / f"{self.name}.json").exists():
            return 1
        status = read_statuses(self._run_folder).get(self.name)
        return 0 if status and phase_of(status.doing) == "done" else None

    def tail(self) -> str:
        """Return the end of its log, if that is in the run's folder."""
        return last_lines(self.log)

    def kill(self) -> None:
        """Do nothing, because the supervisor cannot end this process."""

    def end(self) -> None:
        """Do nothing, because the process ends itself when the run is over."""


class ManualHost:
    """Stands for all hosts on which the user starts processes."""

    devices: tuple[str, ...] = ()
    lost: HostLost | None = None  # the supervisor cannot know

    def __init__(self, run_folder: RunFolder, interface: str | None) -> None:
        self.address = own_address(interface)
        self._run_folder = run_folder
        self._commands: dict[str, str] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        ends_on_term: bool = True,  # noqa: ARG002 it ends by itself
    ) -> ManualProcess:
        """Print the command that starts it."""
        of_each_host = {*self._run_folder.private.environment(), "CUDA_VISIBLE_DEVICES"}
        common = [f"{key}={value}" for key, value in env.items() if key not in of_each_host]
        self._commands[name] = shlex.join([*common, *command])
        write_whole(self._run_folder.commands, "\n".join([*self._commands.values(), ""]))
        if len(self._commands) == 1:
            say(
                f"start these in {os.getcwd()}, on any host that has it and the run's folder "
                f"(also in {self._run_folder.commands}; docs/scaling.md says how srun does). "
                f"{_SHARES}:"
            )
        say(f"  {self._commands[name]}")
        return ManualProcess(self._run_folder, name, log)

    def free_port(self) -> int:
        """Return a TCP port that was free on this machine a moment ago."""
        return free_port(self.address)

    def end(self) -> None:
        """Tell the processes that the run is over."""
        self._run_folder.over.touch()


@dataclass(frozen=True, kw_only=True)
class ManualCluster:
    """Hosts that the user has reserved (conf/cluster/manual.yaml explains each key)."""

    spans_hosts: ClassVar[bool] = True
    by_hand: ClassVar[bool] = True

    gpus: bool
    interface: str | None

    @contextmanager
    def hosts(
        self,
        run_folder: RunFolder,
        reaper: Reaper,  # noqa: ARG002 nothing is a child of this process
        demand: Demand,
    ) -> Iterator[Hosts]:
        """Yield one host that stands for all of them."""
        host = ManualHost(run_folder, self.interface)
        try:
            yield Hosts(host, [host] * demand.replicas, [host] * demand.ranks)
        finally:
            host.end()
