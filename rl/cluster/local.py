"""This machine: parts are children of the supervisor, and the reaper knows them all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from rl.cluster.host import Demand, HostLost, Hosts
from rl.run.child import Child, Reaper, end_together
from rl.run.devices import visible_cores, visible_gpus
from rl.run.folder import RunFolder
from rl.run.interface import free_port


class LocalHost:
    """The supervisor's own machine; `network` is what its parts are told of the others."""

    lost: HostLost | None = None

    def __init__(
        self, reaper: Reaper, address: str = "127.0.0.1", network: Mapping[str, str] | None = None
    ) -> None:
        self.address, self._network = address, dict(network or {})
        self.devices, self.cores = tuple(visible_gpus()), len(visible_cores())
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
        """Start a part as a child of this process."""
        env = {**self._network, **env}
        child = Child(
            name, command, log=log, reaper=self._reaper, env=env, ends_on_term=ends_on_term
        )
        self._children.append(child)
        child.start()
        return child

    def free_port(self) -> int:
        """Return a TCP port that nobody listened on a moment ago."""
        return free_port(self.address)

    def end(self) -> None:
        """End all parts within one grace period."""
        end_together(self._children)
        for child in self._children:
            child.end()


class LocalCluster:
    """One host, this one: nothing has to be reserved, and Unix sockets reach everybody."""

    spans_hosts: ClassVar[bool] = False
    by_hand: ClassVar[bool] = False

    @contextmanager
    def hosts(
        self,
        run_folder: RunFolder,  # noqa: ARG002 other clusters ask whether every host sees it
        reaper: Reaper,
        demand: Demand,
    ) -> Iterator[Hosts]:
        """Yield this machine for everything; end what was started there."""
        host = LocalHost(reaper)
        try:
            yield Hosts(host, [host] * demand.replicas, [host] * demand.ranks)
        finally:
            host.end()
