"""Start and watch the vLLM servers of a run, and restart a server that fails.

    starting ---> serving ---> gone: ended, closed its socket, fell silent, or must restart
        ^                        |
        `---- incarnation + 1 ---'   unless this server ended too often

A restarted server has the weights of the base model, so it gets no requests before the trainer's
next push. Other processes read its incarnation (number of restarts) from its endpoint file.

If no other server works, the run waits for the restart. In that case only a server that has served
and crashed is restarted, because one that fails to start or refuses the weights would fail again.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rl.cluster.host import HostLost, Process
from rl.inference.replica import Replica, refuses_connections
from rl.inference.routes import is_healthy
from rl.runtime.child import describe_exit
from rl.runtime.endpoint import Endpoint, read_restart_request
from rl.runtime.folder import RunFolder
from rl.runtime.status import Status
from rl.runtime.warning_lines import note_warning

_HEALTH_EVERY_S = 5.0
_SILENT_S = 60.0  # a server that does not answer for this long is restarted if another one works
_WITHIN_STEPS = 10
# The run ends if a server ends 3 times within 10 steps, or 2 times if no other server works.
_MAX_DEATHS, _MAX_DEATHS_ALONE = 3, 2

StartReplica = Callable[[Replica], Process | None]  # returns None for an external server


@dataclass(eq=False)
class WatchedReplica:
    replica: Replica
    status: Status
    child: Process | None = None
    ready: bool = False
    started: float = 0.0  # `time.monotonic()` at the latest start
    answered_at: float = 0.0  # `time.monotonic()` at the latest answer
    death_steps: deque[int] = field(default_factory=lambda: deque[int](maxlen=_MAX_DEATHS))

    def died_often(self, times: int) -> bool:
        deaths = list(self.death_steps)[-times:]
        return len(deaths) == times and deaths[-1] - deaths[0] < _WITHIN_STEPS


class Replicas:
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
        """`why_unusable` returns the problem of a running server, or None if it is usable."""
        self._all = [WatchedReplica(each, Status(run_folder, each.name)) for each in replicas]
        self._run_folder, self._start_child, self._num_steps = run_folder, start, num_steps
        self._startup_timeout, self._wait_timeout = startup_timeout, wait_timeout
        self._why_unusable = why_unusable
        self._pool = ThreadPoolExecutor(len(replicas))  # one thread per server

    def start(self) -> None:
        for server in self._all:
            self._start(server)

    def _start(self, server: WatchedReplica) -> None:
        replica = server.replica
        server.ready, server.started = False, time.monotonic()
        server.child = self._start_child(replica)
        again = ", again" if replica.incarnation else ""
        starting = f"starting vLLM{again} ({replica.log})"
        server.status.set(starting if server.child else f"waiting for {replica.address} to answer")
        pid = server.child.group if server.child else None
        endpoint = Endpoint(replica.address, replica.incarnation, pid or 0)
        endpoint.write(self._run_folder, replica.name)

    def check_and_restart(self, *, may_restart: bool) -> tuple[str, str] | None:
        """Restart failed servers. Return None, or (server name, cause) if the run must end."""
        # Check in parallel, because the check of a server that does not answer takes seconds.
        seen = list(zip(self._all, self._pool.map(self._cause_of_end, self._all), strict=True))
        gone = [(server, cause) for server, cause in seen if cause is not None]
        another_serves = any(server.ready for server, cause in seen if cause is None)
        if may_restart and another_serves:
            # End hung servers in parallel, because each takes seconds.
            list(self._pool.map(lambda item: item[0].child and item[0].child.end(), gone))
        for server, cause in gone:
            name = server.replica.name
            server.death_steps.append(self._num_steps())
            max_deaths = _MAX_DEATHS if another_serves else _MAX_DEATHS_ALONE
            if server.child is not None and server.died_often(max_deaths):
                nth = "2nd" if max_deaths == 2 else "3rd"
                return name, f"{cause} for the {nth} time within {_WITHIN_STEPS} steps"
            if not may_restart or not (another_serves or self._has_crashed(server)):
                return name, cause
            self._restart(server, cause)
            if not self._all:  # the last server was on a lost host
                return name, cause
        return None

    def _has_crashed(self, server: WatchedReplica) -> bool:
        """Return whether `server`, started by this run, was ready and then failed."""
        if server.child is None or not server.ready:
            return False
        return server.child.returncode is not None or not is_healthy(server.replica)

    def _restart(self, server: WatchedReplica, cause: str) -> None:
        name, others = server.replica.name, len(self._all) - 1
        go_on = f"{others} others continue" if others > 1 else "the other one continues"
        go_on = go_on if others else "the run waits for it"
        again = "the server is restarted" if server.child is not None else "waiting for its answer"
        note_warning(self._run_folder, name, f"{cause}; {again}, and {go_on}")
        if server.child is not None:
            server.child.end()
            if path := server.replica.address.path:
                path.unlink(missing_ok=True)  # vLLM cannot bind to an existing path
        server.replica = replace(server.replica, incarnation=server.replica.incarnation + 1)
        try:
            self._start(server)
        except HostLost as lost:
            self._all.remove(server)
            server.status.set("its host is lost")
            lost_at = Endpoint(server.replica.address, server.replica.incarnation)
            lost_at.write(self._run_folder, name)
            note_warning(self._run_folder, name, f"{lost}; {go_on} without it")

    def _cause_of_end(self, server: WatchedReplica) -> str | None:
        """Return why a server must be restarted, or None. A recent answer counts as healthy."""
        if server.child is not None and server.child.returncode is not None:
            # End vLLM's engine too, because a push would hang while the engine has the socket open.
            with suppress(HostLost):
                server.child.kill()
            return describe_exit(server.child.returncode)
        replica = server.replica
        why = read_restart_request(self._run_folder, replica.name, replica.incarnation)
        if why is not None:
            return f"is unusable: {why}"
        now = time.monotonic()
        if server.ready and now - server.answered_at < _HEALTH_EVERY_S:
            return None
        # Another program, or a refused key, at an external address counts as healthy here, because
        # `why_unusable` reports it.
        if is_healthy(replica, or_unusable=not server.ready and server.child is None):
            if not server.ready and (problem := self._why_unusable(replica)):
                # Ignore the problem soon after a restart, because routes may still be missing.
                is_recent = replica.incarnation > 0 and now - server.started < _SILENT_S
                return None if is_recent else problem
            server.ready, server.answered_at = True, now
            server.status.set("serving")
        elif not server.ready:
            is_late = now - server.started > self._startup_timeout
            return self._startup_failure(server) if is_late else None
        elif refuses_connections(replica):
            # vLLM's engine has died. Kill its server, which would wait forever for open requests.
            if server.child is None:
                return "accepts no connections any more"
            with suppress(HostLost):
                server.child.kill()  # the next call of `check_and_restart` sees that it has ended
        elif now - server.answered_at > self._tolerated_silence(server):
            return "has stopped answering"
        return None

    def _startup_failure(self, server: WatchedReplica) -> str:
        limit = f"inference.startup_timeout={self._startup_timeout:g} s"
        if server.child is not None:
            return f"did not answer within {limit}: raise this limit if vLLM is slow"
        address = server.replica.address
        return f"did not answer as vLLM at {address} within {limit}: start it (docs/scaling.md)"

    def _tolerated_silence(self, server: WatchedReplica) -> float:
        another_serves = any(other.ready for other in self._all if other is not server)
        # If no other server works, restart this server before the ranks that wait for it time out.
        return min(_SILENT_S, self._wait_timeout) if another_serves else self._wait_timeout / 2
