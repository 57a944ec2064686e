"""The vLLMs of a run: started, watched, and started again as long as another one goes on.

    starting ---> serving ---> gone: ended, closed its socket, silent, or somebody asked for it
        ^                        |
        `---- incarnation + 1 ---'   unless it is the only one, or dies again and again

Whoever is started again holds old weights, so nobody asks it before the trainer has pushed to it;
until then its endpoint only says that the incarnation before is no more.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rl.cluster.host import HostLost, Part
from rl.inference.replica import NOWHERE_YET, Replica, closed
from rl.inference.routes import healthy
from rl.run.child import ending
from rl.run.endpoint import Endpoint, restart_request
from rl.run.folder import RunFolder
from rl.run.status import Status
from rl.run.warning_lines import note_warning

_HEALTH_EVERY_S = 5.0
_SILENT_S = 60.0  # of a replica whose work others can do
_MOST_DEATHS, _WITHIN_STEPS = 3, 10  # of one replica: then it is no accident

Start = Callable[[Replica], Part | None]  # None: somebody else's, which may come back by itself


@dataclass(eq=False)
class Watched:
    """One vLLM, and since when it is what it is."""

    replica: Replica
    status: Status
    child: Part | None = None
    ready: bool = False
    began: float = 0.0  # monotonic seconds: its start
    checked: float = 0.0  # likewise: the last time it answered
    deaths: deque[int] = field(default_factory=lambda: deque[int](maxlen=_MOST_DEATHS))  # steps


class Replicas:
    """All vLLMs of one run."""

    def __init__(
        self,
        replicas: list[Replica],
        run_folder: RunFolder,
        start: Start,
        *,
        startup_timeout: float,
        wait_timeout: float,
        num_steps: Callable[[], int],
        unfit: Callable[[Replica], str | None] = lambda _: None,
    ) -> None:
        """`start` starts one of them; `num_steps` says how many steps are done.

        `unfit` says why one that answers cannot be used.
        """
        self._all = [Watched(one, Status(run_folder, one.name)) for one in replicas]
        self._run_folder, self._start_child, self._num_steps = run_folder, start, num_steps
        self._startup_timeout, self._wait_timeout = startup_timeout, wait_timeout
        self._unfit = unfit

    def start(self) -> None:
        """Start all of them at once."""
        for one in self._all:
            self._start(one)

    @property
    def children(self) -> list[Part]:
        """The processes of those that are ours."""
        return [one.child for one in self._all if one.child is not None]

    def _start(self, one: Watched) -> None:
        replica = one.replica
        one.ready, one.began = False, time.monotonic()
        one.child = self._start_child(replica)
        again = ", again" if replica.incarnation else ""
        if replica.address == NOWHERE_YET:
            one.status.set(f"waiting for somebody to start vLLM ({self._run_folder.commands})")
            return
        starting = f"starting vLLM{again} ({replica.log})"
        one.status.set(starting if one.child else f"waiting for {replica.address} to answer")
        pid = one.child.group if one.child else None
        Endpoint(replica.address, replica.incarnation, pid or 0).write(
            self._run_folder, replica.name
        )

    def look(self, *, may_restart: bool) -> tuple[str, str] | None:
        """Start again whoever is gone; return who ends the run by that, and what became of it."""
        seen = [(one, self._gone(one)) for one in self._all if self._is_somewhere(one)]
        gone = [(one, what) for one, what in seen if what is not None]
        # Before anybody is started again, which takes seconds each: the ranks wait for this answer.
        goes_on = any(one.ready for one, what in seen if what is None)
        for one, what in gone:
            one.deaths.append(self._num_steps())
            if not may_restart or not goes_on:
                return one.replica.name, what
            if one.child is not None and dies_again_and_again(one):
                times = f"for the {_MOST_DEATHS}rd time within {_WITHIN_STEPS} steps"
                return one.replica.name, f"{what} {times}"
            self._restart(one, what)
        return None

    def _others(self, one: Watched) -> list[Watched]:
        return [other for other in self._all if other is not one]

    def _restart(self, one: Watched, what: str) -> None:
        name, others = one.replica.name, len(self._others(one))
        go_on = f"{others} others go on" if others > 1 else "the other one goes on"
        again = "it is started again" if one.child is not None else "it may come back"
        note_warning(self._run_folder, name, f"{what}; {again}, and {go_on}")
        if one.child is not None:
            one.child.end()
            if path := one.replica.address.path:
                path.unlink(missing_ok=True)  # vLLM binds no path that is there
        one.replica = replace(one.replica, incarnation=one.replica.incarnation + 1)
        try:
            self._start(one)
        except HostLost as lost:
            self._all.remove(one)
            one.status.set("its machine is gone")
            Endpoint(one.replica.address, one.replica.incarnation, 0).write(self._run_folder, name)
            note_warning(self._run_folder, name, f"{lost}; {go_on} without it")

    def _gone(self, one: Watched) -> str | None:
        """Return what became of it, None while it lives. Looks at its routes every few seconds."""
        if one.child is not None and one.child.returncode is not None:
            # Killed alone it leaves an engine that keeps its socket open: a push would wait there.
            with suppress(HostLost):
                one.child.kill()
            return ending(one.child.returncode)
        asked = restart_request(self._run_folder, one.replica.name, one.replica.incarnation)
        if asked is not None:
            return f"was given up: {asked}"
        now = time.monotonic()
        if one.ready and now - one.checked < _HEALTH_EVERY_S:
            return None
        if healthy(one.replica):
            if not one.ready and (problem := self._unfit(one.replica)):
                # One that came back as another is asked again now and then: it may come back right.
                again = one.replica.incarnation > 0 and now - one.began < _SILENT_S
                return None if again else problem
            one.ready, one.checked = True, now
            one.status.set("serving")
        elif not one.ready:
            return self._late(one) if now - one.began > self._startup_timeout else None
        elif closed(one.replica):
            # Its engine died, and it waits for the end of requests that nobody answers any more.
            if one.child is None:
                return "takes no connections any more"
            with suppress(HostLost):
                one.child.kill()  # the next look finds that it has ended
        elif now - one.checked > self._patience(one):
            return "has stopped answering"
        return None

    def _late(self, one: Watched) -> str:
        limit = f"inference.startup_timeout={self._startup_timeout:g} s"
        if one.child is not None:
            return f"did not answer within {limit}"
        return f"did not answer at {one.replica.address} within {limit}: start it (docs/scaling.md)"

    def _is_somewhere(self, one: Watched) -> bool:
        """Whether it has said where it listens: whoever starts one by hand may take any time."""
        said = Endpoint.read(self._run_folder, one.replica.name) if one.child is None else None
        was_nowhere = one.replica.address == NOWHERE_YET
        if said is not None and (was_nowhere or said.incarnation > one.replica.incarnation):
            one.replica = replace(one.replica, address=said.address, incarnation=said.incarnation)
            one.ready, one.began = False, time.monotonic()
            one.status.set(f"starting vLLM ({one.replica.log})")
        return one.replica.address != NOWHERE_YET

    def _patience(self, one: Watched) -> float:
        others = any(other.ready for other in self._others(one))
        return min(_SILENT_S, self._wait_timeout) if others else self._wait_timeout


def dies_again_and_again(one: Watched) -> bool:
    """Whether its last deaths lie so close together that starting it again is of no use."""
    deaths = one.deaths
    return len(deaths) == deaths.maxlen and deaths[-1] - deaths[0] < _WITHIN_STEPS
