"""This machine: processes are children of the supervisor, and the reaper knows them all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from rl.cluster.host import Demand, HostLost, Hosts
from rl.runtime.child import Child, Reaper, end_together
from rl.runtime.devices import visible_gpus
from rl.runtime.folder import RunFolder
from rl.runtime.network import free_port


class LocalHost:
    """The supervisor's machine; `network` tells its processes how to reach the other hosts."""

    lost: HostLost | None = None

    def __init__(
        self, reaper: Reaper, address: str = "127.0.0.1", network: Mapping[str, str] | None = None
    ) -> None:
        self.address, self._network = address, dict(network or {})
        self.devices = tuple(visible_gpus())
        self._reaper = reaper
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        ends_on_term: bool = True,
    ) -> Child:
        """Start a child of this process."""
        env = {**self._network, **env}
        child = Child(
            name, command, log=log, reaper=self._reaper, env=env, ends_on_term=ends_on_term
        )
        self._children.append(child)
        child.start()
        return child

    def free_port(self) -> int:
        """Return a TCP port that was free a moment ago."""
        return free_port(self.address)

    def end(self) -> None:
        """End all processes within one grace period."""
        end_together(self._children)
        for child in self._children:
            child.end()


class LocalCluster:
    """One host, this one: nothing is reserved, and Unix sockets connect all processes."""

    spans_hosts: ClassVar[bool] = False
    by_hand: ClassVar[bool] = False

    @contextmanager
    def hosts(
        self,
        run_folder: RunFolder,  # noqa: ARG002 other clusters check that every host sees it
        reaper: Reaper,
        demand: Demand,
    ) -> Iterator[Hosts]:
        """Yield this machine for all processes; end them after the block."""
        host = LocalHost(reaper)
        try:
            yield Hosts(host, [host] * demand.replicas, [host] * demand.ranks)
        finally:
            host.end()
