"""Choose the replica of each request: a new group uses the least busy one and stays there.

Rollouts of a group share a prompt, and each turn begins with the previous turns. So the replica
that sampled the first turns has most of the next request in its prefix cache.

    serve(replicas)    use only these replicas, because they have the newest weights
    lose(route, why)   exclude a replica until it restarts; its groups choose another one
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl.inference.replica import Replica


@dataclass(eq=False)
class Route:
    """A replica and its current load."""

    replica: Replica
    num_groups: int = 0  # number of groups that use this replica
    num_pending: int = 0  # number of completions that are requested but not answered
    num_completions: int = 0  # number of completions since the last logged metrics
    num_tokens: int = 0  # number of sampled tokens since the last logged metrics
    num_failed_in_a_row: int = 0  # number of consecutive failed requests
    lost: bool = False
    close_session: Callable[[], None] = lambda: None  # closes the connections of open requests


@dataclass(eq=False)
class Group:
    """Requests that use the same replica: requests of a group of rollouts, or a single request."""

    router: "Router"
    _route: Route | None = None

    def route(self) -> Route:
        """Return the group's route: the same replica as before, unless that replica was lost."""
        if self._route is None or self._route.lost:
            self.leave()
            self._route = self.router.least_busy()
            self._route.num_groups += 1
        return self._route

    def leave(self) -> None:
        """Stop counting this group as load of its replica."""
        if self._route is not None:
            self._route.num_groups -= 1
        self._route = None


@dataclass(eq=False)
class Router:
    """The routes that requests may use; all tasks of an event loop share one router."""

    on_lost: Callable[[Replica, str], None] = lambda _replica, _why: None
    _routes: dict[str, Route] = field(default_factory=dict)  # keys are names of replicas
    _lost: dict[str, int] = field(default_factory=dict)  # name of a lost replica -> its incarnation

    @classmethod
    def to(cls, *replicas: Replica) -> "Router":
        """Return a router to these replicas."""
        router = cls()
        router.serve(replicas)
        return router

    @property
    def routes(self) -> list[Route]:
        """The routes of the replicas that may receive requests."""
        return list(self._routes.values())

    def serve(self, replicas: Iterable[Replica]) -> None:
        """Send requests only to these replicas, because they have the newest weights."""
        given = {replica.name: replica for replica in replicas}
        if not given:  # no replica has the newest weights, so keep the current replicas
            return
        for name, route in list(self._routes.items()):
            if name not in given or given[name].incarnation != route.replica.incarnation:
                self._remove(route)
        fresh = {
            name: Route(replica)
            for name, replica in given.items()
            if name not in self._routes and self._lost.get(name) != replica.incarnation
        }
        self._routes |= fresh
        if not self._routes:  # use lost replicas, because only they have the newest weights
            self._routes = {name: Route(replica) for name, replica in given.items()}

    def least_busy(self) -> Route:
        """Return the route with the fewest groups; among equals, with the fewest completions."""
        return min(self._routes.values(), key=lambda route: (route.num_groups, route.num_pending))

    def lose(self, route: Route, why: str) -> bool:
        """Stop using a replica; return False if it is the only one, which must remain in use."""
        if route.lost:
            return True
        if self._routes.keys() <= {route.replica.name}:
            return False
        self._remove(route)
        self.on_lost(route.replica, why)
        return True

    def _remove(self, route: Route) -> None:
        route.lost = True
        self._lost[route.replica.name] = route.replica.incarnation
        del self._routes[route.replica.name]
        route.close_session()

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Yield a group that uses one replica while the block runs."""
        group = Group(self)
        try:
            yield group
        finally:
            group.leave()
