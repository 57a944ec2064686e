"""Which replica is asked: a group stays with one, and a new group goes to the least busy one.

Rollouts of a group share a prompt, and each turn begins with the previous one. So the replica that
sampled the first turns has most of the next request in its prefix cache.

    serve(replicas)    these have the live weights; others are asked no more
    lose(route, why)   excluded until its next incarnation; its groups choose again
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl.inference.replica import Replica


@dataclass(eq=False)
class Route:
    """A replica and its load."""

    replica: Replica
    num_groups: int = 0  # that stay with it
    num_flying: int = 0  # completions requested and not answered
    num_completions: int = 0  # answered since the last look
    num_tokens: int = 0  # sampled since the last look
    num_failed_in_a_row: int = 0  # requests
    lost: bool = False
    hang_up: Callable[[], None] = lambda: None  # closes the connections of open requests


@dataclass(eq=False)
class Group:
    """Requests that stay together: of a group of rollouts, or a single request."""

    router: "Router"
    _route: Route | None = None

    def route(self) -> Route:
        """Return where to ask: the same replica as before, unless it was lost."""
        if self._route is None or self._route.lost:
            self.leave()
            self._route = self.router.least_busy()
            self._route.num_groups += 1
        return self._route

    def leave(self) -> None:
        """Stop counting as load of the replica."""
        if self._route is not None:
            self._route.num_groups -= 1
        self._route = None


@dataclass(eq=False)
class Router:
    """One instance per event loop, shared by the tasks that ask and the one that publishes."""

    on_lost: Callable[[Replica, str], None] = lambda _replica, _why: None
    _routes: dict[str, Route] = field(default_factory=dict)  # by name of the replica
    _out: dict[str, int] = field(default_factory=dict)  # the lost incarnation, by name

    @classmethod
    def to(cls, *replicas: Replica) -> "Router":
        """Return a router to these replicas."""
        router = cls()
        router.serve(replicas)
        return router

    @property
    def routes(self) -> list[Route]:
        """The replicas that may be asked."""
        return list(self._routes.values())

    def serve(self, replicas: Iterable[Replica]) -> None:
        """Ask these replicas from now on, because they have the live weights."""
        given = {replica.name: replica for replica in replicas}
        if not given:  # no replica has them, so the ones asked so far stay until they are replaced
            return
        for name, route in list(self._routes.items()):
            if name not in given or given[name].incarnation != route.replica.incarnation:
                self._remove(route)
        fresh = {
            name: Route(replica)
            for name, replica in given.items()
            if name not in self._routes and self._out.get(name) != replica.incarnation
        }
        self._routes |= fresh
        if not self._routes:  # all were lost once, but only they hold the weights
            self._routes = {name: Route(replica) for name, replica in given.items()}

    def least_busy(self) -> Route:
        """Return the route with the fewest groups; among equals, the one with fewest requests."""
        return min(self._routes.values(), key=lambda route: (route.num_groups, route.num_flying))

    def lose(self, route: Route, why: str) -> bool:
        """Stop asking this replica; return False if it is the only one, which must stay."""
        if route.lost:
            return True
        if self._routes.keys() <= {route.replica.name}:
            return False
        self._remove(route)
        self.on_lost(route.replica, why)
        return True

    def _remove(self, route: Route) -> None:
        route.lost = True
        self._out[route.replica.name] = route.replica.incarnation
        del self._routes[route.replica.name]
        route.hang_up()

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Yield a group that stays with one replica while the block runs."""
        group = Group(self)
        try:
            yield group
        finally:
            group.leave()
