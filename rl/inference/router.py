"""Choose the least busy vLLM replica for all requests of a group of rollouts.

The rollouts of a group share a prompt, and a later prompt usually begins with earlier turns. So
the replica that sampled the first turns has most of the next prompt in its prefix cache.

    serve(replicas)    use only these replicas, because they have the newest weights
    lose(route, why)   stop using a replica until it restarts. Its groups use another replica, or
                       wait for the restart if there is no other replica
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from envs.deadline import WAITING
from rl.inference.completion import RequestFailed
from rl.inference.replica import Replica, refuses_connections


@dataclass(eq=False)
class Route:
    """The router's record of one replica, with counts of its groups, completions and failures."""

    replica: Replica
    num_groups: int = 0  # number of groups that use this replica
    num_pending: int = 0  # number of requested completions that have not arrived
    num_completions: int = 0  # number of completions since metrics were last logged
    num_tokens: int = 0  # number of sampled tokens since metrics were last logged
    num_failed_in_a_row: int = 0  # number of consecutive failed requests
    lost: bool = False  # whether the router stopped using this replica
    close_session: Callable[[], None] = lambda: None  # closes all connections to the replica


@dataclass(eq=False)
class RequestGroup:
    """Chooses one replica for all requests of a group of rollouts."""

    router: "Router"
    chosen: Route | None = None

    async def wait_for_route(self) -> Route:
        # The wait needs no deadline, because the supervisor ends the run if the restart fails.
        while not self.router.routes:
            if self.router.ends:
                raise RequestFailed("no vLLM answers, and the run is already ending")
            with WAITING.get()():
                await self.router.serving.wait()
        return self.choose_route()

    def choose_route(self) -> Route:
        if self.chosen is None or self.chosen.lost:
            self.release_route()
            self.chosen = min(self.router.routes, key=lambda r: (r.num_groups, r.num_pending))
            self.chosen.num_groups += 1
        return self.chosen

    def release_route(self) -> None:
        if self.chosen is not None:
            self.chosen.num_groups -= 1
        self.chosen = None


@dataclass(eq=False)
class Router:
    """The replicas that may get requests. All tasks of the rollouts process share one router.

    Attributes:
        on_lost: called with each lost replica and the reason, to request a restart.
        restarted: returns whether the supervisor has replaced a replica. It is None if no
            supervisor restarts replicas. Then the router keeps the last replica to the end.
        serving: set while at least one replica may get requests, and when the run ends.
    """

    on_lost: Callable[[Replica, str], None] = lambda _replica, _why: None
    restarted: Callable[[Replica], bool] | None = None
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    ends: bool = False
    _routes: dict[str, Route] = field(default_factory=dict)  # name of a replica -> its route
    _lost: dict[str, int] = field(default_factory=dict)  # name of a lost replica -> its incarnation

    @classmethod
    def with_replicas(cls, *replicas: Replica) -> "Router":
        router = cls()
        router.serve(replicas)
        return router

    @property
    def routes(self) -> list[Route]:
        return list(self._routes.values())

    def serve(self, replicas: Iterable[Replica]) -> None:
        """Use only these replicas from now on. The caller has pushed the newest weights to them."""
        updated = {replica.name: replica for replica in replicas}
        if not updated:  # no replica has newer weights, so keep the current replicas
            return
        for name, route in list(self._routes.items()):
            if name not in updated or updated[name].incarnation != route.replica.incarnation:
                self._remove(route)
        self._routes |= {
            name: Route(replica)
            for name, replica in updated.items()
            if name not in self._routes and self._lost.get(name) != replica.incarnation
        }
        if self._routes:
            self.serving.set()

    def lose(self, route: Route, why: str) -> bool:
        """Stop using a replica. If it is the last and cannot restart, keep it and return False."""
        if route.lost:
            return True
        if not self.restarted and self._routes.keys() <= {route.replica.name}:
            return False
        self._remove(route)
        self.on_lost(route.replica, why)
        return True

    def _remove(self, route: Route) -> None:
        route.lost = True
        self._lost[route.replica.name] = route.replica.incarnation
        del self._routes[route.replica.name]
        if not self._routes:
            self.serving.clear()
        route.close_session()

    def end(self) -> None:
        self.ends = True
        self.serving.set()  # wake the requests that wait for a restart, so that they fail

    def is_gone(self, replica: Replica, *, unanswered: bool) -> bool:
        """Return whether a replica has ended or was restarted. May block for seconds."""
        if self.restarted and self.restarted(replica):
            return True
        return unanswered and refuses_connections(replica)
