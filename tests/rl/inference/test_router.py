"""Which replica is asked, and how requests move to another one if theirs is lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientTimeout

from rl.inference import client as module
from rl.inference.client import RequestTally, VLLMClient
from rl.inference.completion import RequestFailed
from rl.inference.replica import Replica
from rl.inference.router import RequestGroup, Router
from rl.runtime.network import Address
from rl.sampling.clock import Clock
from tests.support.engine_faults import Fault, Hang, Status
from tests.support.scripted import tiny_model
from tests.support.scripted_vllm import Engine, asking_for
from tests.support.served_engine import GENERATE, ServedEngine, a_group, serving


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
    router = Router.with_replicas(*map(replica, range(3)))
    for route, count, requests in zip(router.routes, groups, flying, strict=True):
        route.num_groups, route.num_pending = count, requests
    assert RequestGroup(router).choose_route() is router.routes[chosen]


def test_a_group_stays_with_its_replica_when_others_become_idle():
    router = Router.with_replicas(replica(0), replica(1))
    groups = [RequestGroup(router) for _ in range(5)]
    asked = [group.choose_route().replica.name for group in groups]
    assert asked == ["inference0", "inference1"] * 2 + ["inference0"]
    groups[1].release_route()
    groups[3].release_route()
    assert [groups[i].choose_route().replica.name for i in (0, 2, 4)] == ["inference0"] * 3
    assert [route.num_groups for route in router.routes] == [3, 0]


def test_groups_of_a_lost_replica_choose_again_among_the_others():
    lost = []
    router = Router(lambda one, why: lost.append((one.name, why)))
    router.serve(map(replica, range(3)))
    groups = [RequestGroup(router) for _ in range(6)]
    first = groups[0].choose_route()
    for group in groups:
        group.choose_route()
    assert router.lose(first, "it ended")
    assert router.lose(first, "another request failed, too")
    assert lost == [("inference0", "it ended")]
    again = [int(g.choose_route().replica.name[-1]) for g in groups]
    assert again == [1, 1, 2, 2, 1, 2]
    assert sorted(route.num_groups for route in router.routes) == [3, 3]
    for group in groups:
        group.release_route()
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
    assert Router(restarted=lambda replica: replica is one).is_gone(one, unanswered=False)


def test_the_last_replica_is_never_lost_and_a_lost_one_comes_back_as_another_incarnation():
    router = Router.with_replicas(replica(0), replica(1))
    assert router.lose(router.routes[0], "")
    assert not router.lose(router.routes[0], "")
    assert numbers(router) == [(1, 0)]
    router.serve([replica(0), replica(1)])  # the trainer has not noticed yet
    assert numbers(router) == [(1, 0)]
    router.serve([replica(1)])
    router.serve([replica(1), replica(0, incarnation=1)])
    assert numbers(router) == [(1, 0), (0, 1)]


def test_only_replicas_with_the_newest_weights_get_requests():
    router = Router.with_replicas(replica(0), replica(1))
    before = router.routes[0]
    router.serve([replica(1), replica(0, incarnation=1)])
    assert before.lost
    assert numbers(router) == [(1, 0), (0, 1)]
    router.serve([replica(0, incarnation=1)])
    assert numbers(router) == [(0, 1)]
    router.serve([])  # the last weights are asked while no replica has newer ones
    assert numbers(router) == [(0, 1)]


SLOW = Hang(seconds=60, times=99)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_DELAY_S", 0.001)


@dataclass
class Cluster:
    """Several replicas, and the counts of failed requests."""

    vllms: list[ServedEngine]
    lost: list[str] = field(default_factory=list)
    tally: RequestTally = field(default_factory=RequestTally)

    def __post_init__(self) -> None:
        self.router = Router(lambda replica, why: self.lost.append(replica.name))
        self.router.serve(vllm.replica for vllm in self.vllms)

    def client(self) -> VLLMClient:
        return VLLMClient(self.router, model="policy", timeout=5.0, tally=self.tally)


@asynccontextmanager
async def cluster(folder: Path, *faults: Sequence[Fault]) -> AsyncIterator[Cluster]:
    """Start a server for each list of faults; all give the same answer to the same request."""
    model = tiny_model(folder)
    vllms = [ServedEngine(model, folder / f"{i}.sock", f"inference{i}") for i in range(len(faults))]
    async with AsyncExitStack() as stack:
        for vllm, chosen in zip(vllms, faults, strict=True):
            await stack.enter_async_context(vllm.serving(chosen))
        yield Cluster(vllms)


async def ask(client):
    return (await a_group(client, 1))[0]


async def test_unanswered_requests_of_a_dead_replica_move_to_another(tmp_path):
    async with cluster(tmp_path, [SLOW], []) as served, served.client() as client:
        groups = asyncio.gather(*(a_group(client, 3) for _ in range(4)))
        await asyncio.sleep(0.2)
        await served.vllms[0].die()
        answers = await groups
        expected = await a_group(client, 1)
    assert all(answer == expected[0] for group in answers for answer in group)
    assert served.lost == ["inference0"]
    assert (served.tally.num_retried, served.tally.num_failed_in_a_row) == (0, 0)


async def test_a_group_releases_its_replica_at_the_end_of_its_block(tmp_path):
    async with cluster(tmp_path, []) as served, served.client() as client:
        (route,) = served.router.routes
        with client.group() as group:
            await group.tokenize([{"role": "user", "content": "hi"}], None)
            assert route.num_groups == 1
        assert route.num_groups == 0


async def test_open_requests_move_when_the_router_loses_their_replica(tmp_path):
    async with cluster(tmp_path, [SLOW], []) as served, served.client() as client:
        group = asyncio.create_task(a_group(client, 3))
        await asyncio.sleep(0.2)
        assert not group.done()
        served.router.lose(served.router.routes[0], "the supervisor starts it again")
        assert len(await group) == 3


async def test_requests_that_wait_for_a_connection_move_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "file_limit", lambda: 8)  # two connections each
    async with cluster(tmp_path, [SLOW], []) as served, served.client() as client:
        group = asyncio.create_task(a_group(client, 10))
        await asyncio.sleep(0.2)
        assert [client._session(r).connector.limit for r in served.router.routes] == [2, 2]
        served.router.lose(served.router.routes[0], "")
        assert len(await group) == 10


async def test_a_cancelled_request_does_not_move(tmp_path):
    async with cluster(tmp_path, [SLOW], []) as served, served.client() as client:
        group = asyncio.create_task(a_group(client, 2))
        await asyncio.sleep(0.2)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
    assert [len(vllm.bodies) for vllm in served.vllms] == [0, 0]
    assert served.lost == []
    assert [route.num_pending for route in served.router.routes] == [0, 0]


async def test_the_death_of_the_last_replica_fails_its_requests(tmp_path):
    async with cluster(tmp_path, [], []) as served, served.client() as client:
        for vllm in served.vllms:
            await vllm.die()
        with pytest.raises(RequestFailed, match="cannot be reached"):
            await ask(client)
    assert served.lost == ["inference0"]
    assert served.tally.num_failed_in_a_row == 1


async def test_a_replica_that_fails_every_request_is_lost_if_others_answer(tmp_path):
    broken = Status(status=404, times=31), Status(status=404, at=32, times=32)
    async with cluster(tmp_path, broken, []) as served, served.client() as client:
        for is_followed_by_an_answer in (True, False):
            for i in range(31):
                with pytest.raises(RequestFailed):
                    await ask(client)  # the first is the least busy, each time
                served.router.routes[0].num_groups += 1
                await ask(client)
                served.router.routes[0].num_groups -= 1
                assert (i, served.lost) == (i, [])
            if is_followed_by_an_answer:
                await ask(client)
        with pytest.raises(RequestFailed):
            await ask(client)
        assert served.lost == ["inference0"]
        await ask(client)


@pytest.mark.parametrize("key", ["a key", "another", None])
async def test_a_request_over_tcp_needs_the_key(key, tmp_path):
    routes = {GENERATE: Engine(tiny_model(tmp_path), 256).generate}
    async with serving(routes, None, asking_for("a key")) as (_, port):
        router = Router.with_replicas(
            Replica("inference", Address(host="127.0.0.1", port=port), key=key)
        )
        async with VLLMClient(router, model="policy", timeout=5) as client:
            if key != "a key":
                with pytest.raises(RequestFailed, match="answered 401"):
                    await ask(client)
                return
            assert (await ask(client))[0].token_ids
            session = client._session(*router.routes)
            assert session.timeout == ClientTimeout(total=None, sock_connect=10.0, sock_read=5)
            assert 0 < (session.connector._keepalive_timeout or 0) < 5  # vLLM's own is 5 s


async def test_requests_wait_for_the_restart_of_the_only_replica_and_pause_their_clock(tmp_path):
    restarted, clock = set[int](), Clock(1.0)
    model = tiny_model(tmp_path)
    before, after = (ServedEngine(model, tmp_path / f"{name}.sock") for name in "ab")
    after.replica = replace(after.replica, incarnation=1)
    router = Router(restarted=lambda replica: replica.incarnation in restarted)
    router.serve([before.replica])

    async def timed():
        async with clock.run():
            return await a_group(client, 3)

    async with before.serving([SLOW]), after.serving(), before.client(router) as client:
        group = asyncio.create_task(timed())
        await asyncio.sleep(0.2)
        await before.die()
        restarted.add(0)
        await asyncio.sleep(1.5)  # longer than the clock runs
        assert (router.routes, group.done()) == ([], False)
        router.serve([before.replica])  # the trainer has not pushed to the new one yet
        assert router.routes == []
        router.serve([after.replica])
        assert len(await group) == 3
        router.lose(router.routes[0], "")
        last = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        router.end()
        with pytest.raises(RequestFailed, match="no vLLM answers, and the run is already ending"):
            await last
