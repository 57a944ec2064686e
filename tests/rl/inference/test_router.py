"""Which replica is asked, as a table: groups stay, new ones go to the one with the fewest."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.inference.replica import Replica
from rl.inference.router import Router
from rl.runtime.network import Address


def replica(number: int, incarnation: int = 0) -> Replica:
    return Replica(f"inference{number}", Address(path=Path(f"/s{number}")), incarnation)


def numbers(router: Router) -> list[tuple[int, int]]:
    """Return number and incarnation of the replicas that may be asked."""
    replicas = [route.replica for route in router.routes]
    return [(int(one.name.removeprefix("inference")), one.incarnation) for one in replicas]


@pytest.mark.parametrize(
    ("groups", "flying", "chosen"),
    [
        ((0, 0, 0), (0, 0, 0), 0),
        ((1, 0, 0), (0, 9, 8), 2),  # groups count first, then requests
        ((2, 1, 1), (0, 3, 2), 2),
        ((2, 3, 4), (9, 0, 0), 0),
    ],
)
def test_a_new_group_goes_to_the_one_with_the_fewest(groups, flying, chosen):
    router = Router.to(*map(replica, range(3)))
    for route, count, requests in zip(router.routes, groups, flying, strict=True):
        route.num_groups, route.num_pending = count, requests
    with router.group() as group:
        assert group.choose_route() is router.routes[chosen]


def test_a_group_stays_with_its_replica_when_others_become_idle():
    router = Router.to(replica(0), replica(1))
    with ExitStack() as stack:
        groups = [stack.enter_context(router.group()) for _ in range(5)]
        asked = [group.choose_route().replica.name for group in groups]
        assert asked == ["inference0", "inference1"] * 2 + ["inference0"]
        groups[1].leave()
        groups[3].leave()
        assert [groups[i].choose_route().replica.name for i in (0, 2, 4)] == ["inference0"] * 3
        assert [route.num_groups for route in router.routes] == [3, 0]
    assert [route.num_groups for route in router.routes] == [0, 0]


def test_groups_of_a_lost_replica_choose_again_among_the_others():
    lost = []
    router = Router(lambda one, why: lost.append((one.name, why)))
    router.serve(map(replica, range(3)))
    with ExitStack() as stack:
        groups = [stack.enter_context(router.group()) for _ in range(6)]
        first = groups[0].choose_route()
        for group in groups:
            group.choose_route()
        assert router.lose(first, "it ended")
        assert router.lose(first, "another request failed, too")
        assert lost == [("inference0", "it ended")]
        again = [int(g.choose_route().replica.name[-1]) for g in groups]
        assert again == [1, 1, 2, 2, 1, 2]
        assert sorted(route.num_groups for route in router.routes) == [3, 3]
    assert [route.num_groups for route in router.routes] == [0, 0]


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [(ConnectionRefusedError, True), (FileNotFoundError, True), (TimeoutError, False)],
)
def test_a_replica_that_refuses_connections_is_gone_and_a_slow_one_is_not(error, is_gone):
    def connect(timeout: float) -> None:
        raise error

    address: Any = SimpleNamespace(connect=connect)
    router, one = Router(), Replica("inference", address)
    assert router.is_gone(one, unanswered=True) == is_gone
    assert not router.is_gone(one, unanswered=False)


def test_the_last_replica_is_never_lost_and_a_lost_one_comes_back_as_another_incarnation():
    router = Router.to(replica(0), replica(1))
    assert router.lose(router.routes[0], "")
    assert not router.lose(router.routes[0], "")
    assert numbers(router) == [(1, 0)]
    router.serve([replica(0), replica(1)])  # the trainer has not noticed yet
    assert numbers(router) == [(1, 0)]
    router.serve([replica(1)])
    router.serve([replica(1), replica(0, incarnation=1)])
    assert numbers(router) == [(1, 0), (0, 1)]


def test_a_replica_without_the_newest_weights_gets_no_more_requests():
    router = Router.to(replica(0), replica(1))
    before = router.routes[0]
    router.serve([replica(1), replica(0, incarnation=1)])
    assert before.lost
    assert numbers(router) == [(1, 0), (0, 1)]
    router.serve([replica(0, incarnation=1)])
    assert numbers(router) == [(0, 1)]
    router.serve([])  # the last weights are asked while no replica has newer ones
    assert numbers(router) == [(0, 1)]


def test_the_only_one_with_the_weights_is_asked_even_if_it_was_lost():
    router = Router.to(replica(0), replica(1))
    router.lose(router.routes[0], "")
    router.serve([replica(0)])
    assert numbers(router) == [(0, 0)]
