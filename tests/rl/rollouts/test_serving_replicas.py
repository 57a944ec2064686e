"""Which vLLMs get requests after a restart, and the load and cache hits of each."""

import asyncio

from rl.inference.router import Route
from rl.rollouts import serving_replicas
from rl.rollouts.serving_replicas import ServingReplicas
from rl.runtime.endpoint import Endpoint, read_restart_request
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from tests.support.replicas import inference


def started(folder: RunFolder, name: str, incarnation: int) -> None:
    Endpoint(Address(path=folder.path / name), incarnation).write(folder, name)


def serving(folder: RunFolder, *incarnations: int) -> ServingReplicas:
    """Return replicas that were restarted so often, each with the newest weights."""
    names = [f"inference{i}" for i in range(len(incarnations))]
    for name, incarnation in zip(names, incarnations, strict=True):
        started(folder, name, incarnation)
    replicas = ServingReplicas(folder, inference(len(names)))
    replicas.publish(dict(zip(names, incarnations, strict=True)))
    return replicas


async def test_metrics_count_since_the_last_batch(tmp_path, monkeypatch):
    counts = {"inference0": [(10.0, 5.0), (30.0, 20.0)], "inference1": [None, (8.0, 0.0)]}
    counts["inference2"] = [(0.0, 0.0)] * 2
    monkeypatch.setattr(
        serving_replicas, "prefix_cache_counts", lambda replica: counts[replica.name].pop(0)
    )
    replicas = serving(RunFolder(tmp_path), 0, 2, 1)
    for i, route in enumerate(replicas.router.routes):
        route.num_groups, route.num_completions, route.num_tokens = 1, 2 + i, 30 + i
    whole = {"inference/replicas_alive": 3, "inference/restarts": 3}
    whole |= {f"inference{i}/groups": 1 for i in range(3)}
    assert await replicas.metrics() == whole | {
        **{f"inference{i}/completions": 2 + i for i in range(3)},
        **{f"inference{i}/tokens": 30 + i for i in range(3)},
        **{"inference0/prefix_hits": 0.5, "inference2/prefix_hits": 0.0},  # 1 was unreachable
    }
    none = {f"inference{i}/{name}": 0 for i in range(3) for name in ("completions", "tokens")}
    hits = {"inference0/prefix_hits": 15 / 20, "inference1/prefix_hits": 0.0}
    assert await replicas.metrics() == whole | none | hits | {"inference2/prefix_hits": 0.0}


async def test_a_single_replica_has_no_metrics(tmp_path):
    started(RunFolder(tmp_path), "inference", 0)
    replicas = ServingReplicas(RunFolder(tmp_path), inference(1))
    replicas.publish({"inference": 0})
    assert len(replicas.router.routes) == 1
    assert await replicas.metrics() == {}


async def test_a_replica_that_the_supervisor_has_restarted_gets_no_more_requests(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(serving_replicas, "_CHECK_INTERVAL_S", 0.01)
    folder = RunFolder(tmp_path)
    replicas = serving(folder, 0, 1)
    first: Route = replicas.router.routes[0]
    watching = asyncio.ensure_future(replicas.watch())
    await asyncio.sleep(0.1)
    assert not first.lost
    started(folder, "inference0", 1)
    async with asyncio.timeout(10):
        while not first.lost:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert [route.replica.name for route in replicas.router.routes] == ["inference1"]
    why = "the supervisor has restarted it"
    assert read_restart_request(folder, "inference0", 0) == why
    assert read_restart_request(folder, "inference1", 1) is None
