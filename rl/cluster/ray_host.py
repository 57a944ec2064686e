"""A node of Ray as a host: our process there starts the parts, and says how they are."""

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.cluster.bundles import Bundle
from rl.cluster.host import HostLost
from rl.cluster.ray_head import RayHead
from rl.run.child import last_lines
from rl.run.failure import RunFailed, message_of
from rl.run.interface import network_environment

_LOST = -signal.SIGKILL  # what a part on a lost host ended with
_ENDING_S = 10.0
_CALL_S = 60.0


class RayPart:
    """A part on a node of Ray."""

    def __init__(self, host: "RayHost", number: int, name: str, log: Path) -> None:
        self._host, self._number, self.name, self.log = host, number, name, log

    @property
    def group(self) -> None:
        """None: it is a process of another machine's."""

    @property
    def returncode(self) -> int | None:
        """Exit status as last heard of, None while running."""
        self._host.look()
        if self._host.lost:
            return _LOST
        return self._host.returncodes.get(self._number)

    def tail(self) -> str:
        """The end of its log, which the run's folder has, or that its host is lost."""
        end = last_lines(self.log)
        return f"{end}\n{self._host.lost}" if self._host.lost else end

    def kill(self) -> None:
        """End all of it."""
        self._host.call("kill", self._number)

    def end(self) -> None:
        """End all of it. Safe to call twice."""
        with suppress(HostLost):
            self.kill()


class RayHost:
    """One bundle: what Ray has reserved on a node."""

    def __init__(
        self,
        ray: Any,
        head: RayHead,
        node: Any,
        address: str,
        bundle: Bundle,
        interface: str | None,
    ) -> None:
        self._head, self._ray, self._node, self._asked = head, ray, node, None
        self.lost: HostLost | None = None
        self.returncodes: dict[int, int | None] = {}
        self.address = address  # as Ray knows it
        if interface:
            self.address = str(self.call("address", interface))
        self.cores = bundle.cores
        self.devices = tuple(self.call("devices")) if bundle.devices else ()
        self._network = network_environment(self.address)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        ends_on_term: bool = True,
    ) -> RayPart:
        """Start a part on the node.

        Raises:
            HostLost: the node is gone.

        """
        env = {**self._network, **env}
        number = self.call("start", name, list(command), env, log.absolute(), ends_on_term)
        return RayPart(self, number, name, log)

    def free_port(self) -> int:
        """Return a TCP port that nobody listened on a moment ago."""
        return self.call("free_port", self.address)

    def look(self) -> None:
        """Hear how the parts are; RunFailed if Ray's head is gone.

        Without waiting for a node: a slow network must not stop the supervisor.
        """
        self._head.look()
        if self.lost:
            return
        if self._asked is None:
            self._asked = self._node.returncodes.remote()
        if self._ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            with suppress(HostLost):  # `lost` says so
                self.returncodes = dict(enumerate(self._get(asked, "returncodes")))

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the node answers.

        Raises:
            HostLost: it is gone.
            RunFailed: it is there, and cannot do that.

        """
        if self.lost:
            raise self.lost
        return self._get(getattr(self._node, method).remote(*arguments), method)

    def _get(self, asked: Any, method: str) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(asked, timeout=_CALL_S)
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            self.lost = HostLost(
                f"the host {self.address} is lost, with all parts of the run there: its Ray node "
                f"or our process on it ended, or it was silent for {_CALL_S:g} s"
            )
            raise self.lost from error
        except errors.RayTaskError as error:
            cause = message_of(error.cause)
            raise RunFailed(f"the host {self.address} failed at `{method}`: {cause}") from error

    def end(self) -> None:
        """End all parts within one grace period."""
        end_together(self._ray, [self])

    @property
    def node(self) -> Any:
        """Our process there."""
        return self._node


def end_together(ray: Any, hosts: Sequence[RayHost]) -> None:
    """End all parts of all hosts within one grace period, then our processes there."""
    ended = [host.node.end.remote() for host in hosts if not host.lost]
    if ended:
        ray.wait(ended, num_returns=len(ended), timeout=_ENDING_S)
    for host in hosts:
        host.node.leave.remote()
        ray.kill(host.node)
