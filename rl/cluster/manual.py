"""Parts that somebody starts by hand, one command each: for srun, torchrun, or another terminal.

The supervisor prints the commands, and from then on sees what the parts write into the run's
folder. It cannot end them: when the run is over it says so there, and they end themselves
(rl/run/by_hand.py).
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.cluster.host import Demand, HostLost, Hosts
from rl.run.child import Reaper, last_lines
from rl.run.folder import RunFolder
from rl.run.interface import free_port, own_address
from rl.run.status import phase_of, read_statuses
from rl.run.terminal import say
from rl.run.whole_files import write_whole

_SHARES = (
    "Parts that share a host share it by what you put before the command: CUDA_VISIBLE_DEVICES, or "
    "OMP_NUM_THREADS where there is no GPU; LOCAL_RANK counts the ranks of one host"
)


class ManualPart:
    """A part of which only its files are seen."""

    def __init__(self, run_folder: RunFolder, name: str, log: Path) -> None:
        self._run_folder, self.name, self.log = run_folder, name, log

    @property
    def group(self) -> None:
        """None: it is a process of another machine's."""

    @property
    def returncode(self) -> int | None:
        """0 once it says that it is done, 1 once it has reported why it cannot go on."""
        if (self._run_folder.failures / f"{self.name}.json").exists():
            return 1
        status = read_statuses(self._run_folder).get(self.name)
        return 0 if status and phase_of(status.doing) == "done" else None

    def tail(self) -> str:
        """The end of its log, where it has one in the run's folder."""
        return last_lines(self.log)

    def kill(self) -> None:
        """Nobody here can."""

    def end(self) -> None:
        """It sees by itself that the run is over."""


class ManualHost:
    """Wherever somebody starts parts."""

    devices: tuple[str, ...] = ()
    cores = 1
    lost: HostLost | None = None  # nobody here knows

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
    ) -> ManualPart:
        """Say with which command to start it."""
        each_has_its_own = {*self._run_folder.private.environment(), "CUDA_VISIBLE_DEVICES"}
        said = [f"{key}={value}" for key, value in env.items() if key not in each_has_its_own]
        self._commands[name] = shlex.join([*said, *command])
        write_whole(self._run_folder.commands, "\n".join([*self._commands.values(), ""]))
        if len(self._commands) == 1:
            say(
                f"start these in {os.getcwd()}, on any host that has it and the run's folder "
                f"(also in {self._run_folder.commands}; docs/scaling.md says how srun does). "
                f"{_SHARES}:"
            )
        say(f"  {self._commands[name]}")
        return ManualPart(self._run_folder, name, log)

    def free_port(self) -> int:
        """Return a TCP port that nobody listened on a moment ago, if it is to be this machine."""
        return free_port(self.address)

    def end(self) -> None:
        """Let the parts know that the run is over."""
        self._run_folder.over.touch()


@dataclass(frozen=True, kw_only=True)
class ManualCluster:
    """Hosts that somebody else has (conf/cluster/manual.yaml explains the knobs)."""

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
