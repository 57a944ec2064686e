"""The cluster for cluster=local: all processes are children of the supervisor on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from rl.cluster.host import Demand, HostLost, Hosts
from rl.runtime.child import Child, Reaper, Start, end_together
from rl.runtime.devices import visible_gpus
from rl.runtime.folder import RunFolder
from rl.runtime.network import free_port


class LocalHost:
    lost: HostLost | None = None

    def __init__(self, reaper: Reaper, address: str = "127.0.0.1") -> None:
        self.address, self.devices = address, tuple(visible_gpus())
        self._reaper = reaper
        self.children: list[Child] = []  # in the order in which they started

    def start(self, start: Start) -> Child:
        child = Child(start, self._reaper)
        self.children.append(child)
        child.start()
        return child

    def free_port(self) -> int:
        return free_port(self.address)

    def end(self) -> None:
        end_together(self.children)
        for child in self.children:
            child.end()


class LocalCluster:
    spans_hosts: ClassVar[bool] = False

    @contextmanager
    def hosts(
        self,
        run_folder: RunFolder,  # noqa: ARG002 RayCluster checks that every host sees the folder
        reaper: Reaper,
        demand: Demand,
    ) -> Iterator[Hosts]:
        host = LocalHost(reaper)
        try:
            yield Hosts(host, [host] * demand.replicas, [host] * demand.ranks)
        finally:
            host.end()
