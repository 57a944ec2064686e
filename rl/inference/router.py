"""Which replica is asked: a group stays with one, a new group goes to the one with the fewest.

Rollouts of a group share its prompt, and each turn begins with the last, so whoever has sampled
some of it has most of the next request in its prefix cache.

    serve(replicas)    these have the live weights, and no others are asked
    lose(route, why)   out, until it comes back as another incarnation; its groups choose again
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl.inference.replica import Replica


@dataclass(eq=False)
class Route:
    """A replica, and what is asked of it."""

    replica: Replica
    num_groups: int = 0  # that stay with it
    num_flying: int = 0  # completions asked for and not answered
    num_completions: int = 0  # answered since the last look
    num_tokens: int = 0  # likewise
    num_failed_in_a_row: int = 0  # requests
    lost: bool = False
    hang_up: Callable[[], None] = lambda: None  # what is still asked gets no answer


@dataclass(eq=False)
class Group:
    """What stays together: a group of rollouts, or a request that is in none."""

    router: "Router"
    _route: Route | None = None

    def route(self) -> Route:
        """Return where to ask: as before, or elsewhere if that one was lost."""
        if self._route is None or self._route.lost:
            self.leave()
            self._route = self.router.least_busy()
            self._route.num_groups += 1
        return self._route

    def leave(self) -> None:
        """Count no longer."""
        if self._route is not None:
            self._route.num_groups -= 1
        self._route = None


def _ignore(replica: Replica, why: str) -> None:
    """Nobody starts it again."""


@dataclass(eq=False)
class Router:
    """One instance, one loop; whoever asks and whoever publishes weights share it."""

    on_lost: Callable[[Replica, str], None] = _ignore
    _routes: dict[str, Route] = field(default_factory=dict)  # by name of the replica
    _out: dict[str, int] = field(default_factory=dict)  # the incarnation that was lost, by name

    @classmethod
    def to(cls, *replicas: Replica) -> "Router":
        """Return a router to these."""
        router = cls()
        router.serve(replicas)
        return router

    @property
    def routes(self) -> list[Route]:
        """Those that may be asked, by name."""
        return list(self._routes.values())

    def serve(self, replicas: Iterable[Replica]) -> None:
        """These have the live weights; whoever was asked and is not among them is lost."""
        given = {replica.name: replica for replica in replicas}
        if not given:  # nobody has them: whoever is asked says so, or is replaced soon
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
        if not self._routes:  # lost once, and yet the only ones that hold the weights
            self._routes = {name: Route(replica) for name, replica in given.items()}

    def least_busy(self) -> Route:
        """Return the route with the fewest groups, of several the one with the fewest requests."""
        return min(self._routes.values(), key=lambda route: (route.num_groups, route.num_flying))

    def lose(self, route: Route, why: str) -> bool:
        """Ask this one no more; False where there is no other, so that nothing else helps."""
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
        """Choose once for as long as the block lasts."""
        group = Group(self)
        try:
            yield group
        finally:
            group.leave()
