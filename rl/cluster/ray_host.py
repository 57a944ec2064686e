"""A node of Ray as a host: our process there starts the others and reports their exit statuses."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.cluster.bundles import Bundle
from rl.cluster.host import HostLost, Start
from rl.runtime.child import last_lines
from rl.runtime.failure import RunFailed, message_of

_LOST = -signal.SIGKILL  # the exit status of a process on a lost host
_ENDING_S = 10.0
_CALL_S = 60.0


class RayProcess:
    """A process on a node of Ray."""

    group: None = None  # it is on another machine

    def __init__(self, host: "RayHost", number: int, name: str, log: Path) -> None:
        self._host, self._number, self.name, self.log = host, number, name, log

    @property
    def returncode(self) -> int | None:
        """Exit status in the latest report, None while it runs."""
        self._host.look()
        if self._host.lost:
            return _LOST
        return self._host.returncodes.get(self._number)

    def tail(self) -> str:
        """Return the end of its log, which is in the run's folder, and the loss of its host."""
        end = last_lines(self.log)
        return f"{end}\n{self._host.lost}" if self._host.lost else end

    def kill(self) -> None:
        """End it with all its children."""
        self._host.call("kill", self._number)

    def end(self) -> None:
        """End it with all its children. Safe to call twice."""
        with suppress(HostLost):
            self.kill()


class RayHost:
    """One bundle: what Ray has reserved on a node."""

    def __init__(
        self,
        ray: Any,
        node: Any,
        address: str,
        bundle: Bundle,
        interface: str | None,
    ) -> None:
        self._ray, self.node, self._asked = ray, node, None
        self.lost: HostLost | None = None
        self.returncodes: dict[int, int | None] = {}
        self.address = address  # as Ray knows it
        if interface:
            self.address = str(self.call("address", interface))
        self.devices = tuple(self.call("devices")) if bundle.devices else ()

    def start(self, start: Start) -> RayProcess:
        """Start a process on the node; HostLost if the node is gone."""
        number = self.call("start", replace(start, log=start.log.absolute()))
        return RayProcess(self, number, start.name, start.log)

    def free_port(self) -> int:
        """Return a TCP port that was free a moment ago."""
        return self.call("free_port", self.address)

    def look(self) -> None:
        """Update the exit statuses without waiting, because the network may be slow."""
        if self.lost:
            return
        if self._asked is None:
            self._asked = self.node.returncodes.remote()
        if self._ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            with suppress(HostLost):  # `lost` keeps the exception
                self.returncodes = dict(enumerate(self._get(asked, "returncodes")))

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the node answers; HostLost if it is gone, RunFailed if it cannot do that."""
        if self.lost:
            raise self.lost
        return self._get(getattr(self.node, method).remote(*arguments), method)

    def _get(self, asked: Any, method: str) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(asked, timeout=_CALL_S)
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            self.lost = HostLost(
                f"the host {self.address} is lost, with all processes of the run there: its Ray "
                f"node or our process on it ended, or it was silent for {_CALL_S:g} s"
            )
            raise self.lost from error
        except errors.RayTaskError as error:
            cause = message_of(error.cause)
            raise RunFailed(f"the host {self.address} failed at `{method}`: {cause}") from error


def end_together(ray: Any, hosts: Sequence[RayHost]) -> None:
    """End all processes of all hosts within one grace period, then our process on each node."""
    ended = [host.node.end.remote() for host in hosts if not host.lost]
    if ended:
        ray.wait(ended, num_returns=len(ended), timeout=_ENDING_S)
    for host in hosts:
        ray.kill(host.node)
