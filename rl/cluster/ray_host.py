"""RayHost forwards the supervisor's calls to RayNode, an actor in a Ray bundle."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.cluster.bundles import Bundle
from rl.cluster.host import HostLost
from rl.runtime.child import Start, last_lines
from rl.runtime.failure import RunFailed, message_of

_LOST = -signal.SIGKILL  # the exit status of every process on a lost host
_CALL_TIMEOUT_S = 60.0


class RayProcess:
    group: None = None  # signals cannot be sent to a process group on another machine

    def __init__(self, host: "RayHost", index: int, name: str, log: Path) -> None:
        self._host, self._index, self.name, self.log = host, index, name, log

    @property
    def returncode(self) -> int | None:
        self._host.update_returncodes()
        if self._host.lost:
            return _LOST
        return self._host.returncodes.get(self._index)

    def tail(self) -> str:
        end = last_lines(self.log)
        return f"{end}\n{self._host.lost}" if self._host.lost else end

    def kill(self) -> None:
        self._host.call("kill", self._index)

    def end(self) -> None:
        with suppress(HostLost):
            self.kill()


class RayHost:
    def __init__(
        self, ray: Any, node: Any, address: str, bundle: Bundle, interface: str | None
    ) -> None:
        self._ray, self.node, self._pending = ray, node, None
        self.lost: HostLost | None = None
        self.returncodes: dict[int, int | None] = {}
        self.address = address  # the node's address in Ray's node table
        if interface:
            self.address = str(self.call("address", interface))
        self.devices = tuple(self.call("devices")) if bundle.devices else ()

    def start(self, start: Start) -> RayProcess:
        index = self.call("start", replace(start, log=start.log.absolute()))
        return RayProcess(self, index, start.name, start.log)

    def free_port(self) -> int:
        return self.call("free_port", self.address)

    def update_returncodes(self) -> None:
        """Request the exit statuses from the RayNode. Store them once they arrive; never wait."""
        if self.lost:
            return
        if self._pending is None:
            self._pending = self.node.returncodes.remote()
        if self._ray.wait([self._pending], timeout=0)[0]:
            future, self._pending = self._pending, None
            with suppress(HostLost):  # `_wait_for` stores the error in `self.lost` before it raises
                self.returncodes = dict(enumerate(self._wait_for(future, "returncodes")))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a RayNode method. Raise RunFailed if it fails, or HostLost if the host is lost."""
        if self.lost:
            raise self.lost
        return self._wait_for(getattr(self.node, method).remote(*arguments), method)

    def _wait_for(self, future: Any, method: str) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(future, timeout=_CALL_TIMEOUT_S)
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            self.lost = HostLost(
                f"the host {self.address} is lost with all its processes, because its Ray node or "
                f"our RayNode ended or did not answer for {_CALL_TIMEOUT_S:g} s: check `ray status`"
            )
            raise self.lost from error
        except errors.RayTaskError as error:
            cause = message_of(error.cause)
            raise RunFailed(f"`{method}` failed on the host {self.address}: {cause}") from error


def end_together(ray: Any, hosts: Sequence[RayHost]) -> None:
    """End all processes of all hosts in parallel, then end the RayNodes."""
    ended = [host.node.end.remote() for host in hosts if not host.lost]
    if ended:
        ray.wait(ended, num_returns=len(ended), timeout=10.0)
    for host in hosts:
        ray.kill(host.node)
