"""The vLLM servers of a run: started, watched, and restarted while another server works.

    starting ---> serving ---> gone: ended, closed its socket, silent, or a restart was requested
        ^                        |
        `---- incarnation + 1 ---'   unless no other server works, or this one ended too often

A restarted server has old weights, so it receives no requests before the trainer's next push. Its
endpoint file tells the other processes that the previous incarnation has ended.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rl.cluster.host import HostLost, Process
from rl.inference.replica import Replica, refuses_connections
from rl.inference.routes import healthy
from rl.runtime.child import ending
from rl.runtime.endpoint import Endpoint, restart_request
from rl.runtime.folder import RunFolder
from rl.runtime.status import Status
from rl.runtime.warning_lines import note_warning

_HEALTH_EVERY_S = 5.0
_SILENT_S = 60.0  # tolerated seconds without an answer of a server while other servers work
_MOST_DEATHS, _WITHIN_STEPS = 3, 10  # a server that ends 3 times in 10 steps is not restarted

StartReplica = Callable[[Replica], Process | None]  # returns None for an external server


@dataclass(eq=False)
class WatchedReplica:
    """One vLLM server and its observed state."""

    replica: Replica
    status: Status
    child: Process | None = None
    ready: bool = False
    started: float = 0.0  # monotonic seconds of the latest start
    answered_at: float = 0.0  # monotonic seconds of the latest answer
    death_steps: deque[int] = field(default_factory=lambda: deque[int](maxlen=_MOST_DEATHS))

    @property
    def dies_too_often(self) -> bool:
        """Whether the server ended so often in recent steps that another restart is useless."""
        deaths = self.death_steps
        return len(deaths) == deaths.maxlen and deaths[-1] - deaths[0] < _WITHIN_STEPS


class Replicas:
    """The vLLM servers of one run, with methods that start, check and restart them."""

    def __init__(
        self,
        replicas: list[Replica],
        run_folder: RunFolder,
        start: StartReplica,
        *,
        startup_timeout: float,
        wait_timeout: float,
        num_steps: Callable[[], int],
        why_unusable: Callable[[Replica], str | None] = lambda _: None,
    ) -> None:
        """Store the servers without starting them.

        Args:
            replicas: the vLLM servers, with their addresses.
            run_folder: folder of the run.
            start: function that starts one server.
            startup_timeout: inference.startup_timeout, in seconds.
            wait_timeout: trainer.wait_timeout, in seconds.
            num_steps: function that returns the number of finished steps.
            why_unusable: function that returns why a working server is unusable, else None.
        """
        self._all = [WatchedReplica(one, Status(run_folder, one.name)) for one in replicas]
        self._run_folder, self._start_child, self._num_steps = run_folder, start, num_steps
        self._startup_timeout, self._wait_timeout = startup_timeout, wait_timeout
        self._why_unusable = why_unusable

    def start(self) -> None:
        """Start all servers without waiting until they answer."""
        for one in self._all:
            self._start(one)

    def _start(self, one: WatchedReplica) -> None:
        replica = one.replica
        one.ready, one.started = False, time.monotonic()
        one.child = self._start_child(replica)
        again = ", again" if replica.incarnation else ""
        starting = f"starting vLLM{again} ({replica.log})"
        one.status.set(starting if one.child else f"waiting for {replica.address} to answer")
        pid = one.child.group if one.child else None
        self._publish(replica, pid or 0)

    def _publish(self, replica: Replica, pid: int) -> None:
        endpoint = Endpoint(replica.address, replica.incarnation, pid)
        endpoint.write(self._run_folder, replica.name)

    def check_and_restart(self, *, may_restart: bool) -> tuple[str, str] | None:
        """Restart ended servers; return a server's name and error if the run must end instead."""
        seen = [(one, self._cause_of_end(one)) for one in self._all]
        gone = [(one, what) for one, what in seen if what is not None]
        # Decide before any restart, because a restart takes seconds and the ranks wait for vLLM.
        another_serves = any(one.ready for one, what in seen if what is None)
        for one, what in gone:
            one.death_steps.append(self._num_steps())
            if not may_restart or not another_serves:
                return one.replica.name, what
            if one.child is not None and one.dies_too_often:
                times = f"for the {_MOST_DEATHS}rd time within {_WITHIN_STEPS} steps"
                return one.replica.name, f"{what} {times}"
            self._restart(one, what)
        return None

    def _restart(self, one: WatchedReplica, what: str) -> None:
        name, others = one.replica.name, len(self._all) - 1
        go_on = f"{others} others continue" if others > 1 else "the other one continues"
        again = "the server is restarted" if one.child is not None else "waiting for its answer"
        note_warning(self._run_folder, name, f"{what}; {again}, and {go_on}")
        if one.child is not None:
            one.child.end()
            if path := one.replica.address.path:
                path.unlink(missing_ok=True)  # vLLM cannot bind to an existing path
        one.replica = replace(one.replica, incarnation=one.replica.incarnation + 1)
        try:
            self._start(one)
        except HostLost as lost:
            self._all.remove(one)
            one.status.set("its host is lost")
            self._publish(one.replica, 0)
            note_warning(self._run_folder, name, f"{lost}; {go_on} without it")

    def _cause_of_end(self, one: WatchedReplica) -> str | None:
        """Return why a server counts as ended, None if it does not. Send it health checks."""
        if one.child is not None and one.child.returncode is not None:
            # The engine may survive its server and keep the socket open, so a push would hang.
            with suppress(HostLost):
                one.child.kill()
            return ending(one.child.returncode)
        asked = restart_request(self._run_folder, one.replica.name, one.replica.incarnation)
        if asked is not None:
            return f"was given up: {asked}"
        now = time.monotonic()
        if one.ready and now - one.answered_at < _HEALTH_EVERY_S:
            return None
        if healthy(one.replica):
            if not one.ready and (problem := self._why_unusable(one.replica)):
                # A restarted server may not have all routes yet, so check again later.
                again = one.replica.incarnation > 0 and now - one.started < _SILENT_S
                return None if again else problem
            one.ready, one.answered_at = True, now
            one.status.set("serving")
        elif not one.ready:
            return self._startup_failure(one) if now - one.started > self._startup_timeout else None
        elif refuses_connections(one.replica):
            # The engine has died, but its server would wait forever for open requests, so kill it.
            if one.child is None:
                return "accepts no connections any more"
            with suppress(HostLost):
                one.child.kill()  # the next call of `check_and_restart` detects the end
        elif now - one.answered_at > self._tolerated_silence(one):
            return "has stopped answering"
        return None

    def _startup_failure(self, one: WatchedReplica) -> str:
        limit = f"inference.startup_timeout={self._startup_timeout:g} s"
        if one.child is not None:
            return f"did not answer within {limit}"
        return f"did not answer at {one.replica.address} within {limit}: start it (docs/scaling.md)"

    def _tolerated_silence(self, one: WatchedReplica) -> float:
        others = any(other.ready for other in self._all if other is not one)
        return min(_SILENT_S, self._wait_timeout) if others else self._wait_timeout
