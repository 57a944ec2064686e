"""A push to several replicas: each gets all weights, and a failed one does not delay the others."""

import time
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from rl.inference.routes import VLLMRoutes
from rl.runtime.failure import RunFailed
from rl.weights.pusher import NoReceiver, WeightPusher
from tests.rl.weights.test_pusher import OnePolicy, Scorer, pusher, two_rows
from tests.support.receiving import SENDERS, opened, refuse, replica


@pytest.fixture
def replicas(tmp_path):
    with ExitStack() as stack:
        names = ["inference0", "inference1", "inference2"]
        yield [stack.enter_context(replica(tmp_path / f"{name}.sock", name)) for name in names]


def sent(policy, sync):
    return policy.adapter_weights() if sync == "adapter" else policy.weights()


@pytest.mark.parametrize("sync", ["gloo", "adapter"])
def test_a_replica_on_a_port_needs_neither_a_folder_nor_memory_of_the_trainer(sync, tmp_path):
    policy = OnePolicy(tmp_path / "model", torch.bfloat16)
    with replica(None, "inference0") as near, replica(None, "inference1") as far:
        push = pusher(sync, near, far)
        for version in (1, 2):
            push.push(policy, version, must_differ=version > 1)
            assert all(one.holds(sent(policy, sync), version) for one in (near, far))
            policy.step()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if sync == "adapter":
        assert near.server.folder != far.server.folder
        assert not near.server.folder.exists()


@pytest.mark.parametrize("sync", SENDERS)
def test_a_replica_that_reads_something_else_is_named_and_the_others_continue(
    sync, replicas, tmp_path
):
    policy, push = OnePolicy(tmp_path / "model"), pusher(sync, *replicas)
    push.push(policy, 1, must_differ=False)  # an adapter's reader checks its first weights
    bad = replicas[1].server
    bad.lie = "0123"
    push.push(policy, 2, must_differ=False)
    ((name, said),) = push.take_lost().items()
    assert name == "inference1"
    assert f"the trainer wrote 0123, vLLM read {push._last}" in said
    assert all(one.holds(sent(policy, sync), 2) for one in (replicas[0], replicas[2]))
    assert bad.version == 1  # it keeps the previous version
    asked = len(bad.routes)
    push.push(policy, 3, must_differ=False)
    assert len(bad.routes) == asked
    assert push.take_lost() == {}


ONE_ROUTE, EACH_ROUTE = ["/start_weight_update"], ["/pause", "/start_weight_update", "/resume"]


@pytest.mark.parametrize(
    ("sync", "routes", "seconds"),
    [("shm", ONE_ROUTE, 1.0), ("gloo", ONE_ROUTE, 1.0), ("shm", EACH_ROUTE, 0.2)],
)
def test_a_slow_replica_is_dropped(sync, routes, seconds, replicas, tmp_path):
    policy, slow = OnePolicy(tmp_path / "model"), replicas[2]
    slow.server.faults |= dict.fromkeys(routes, partial(time.sleep, seconds))
    impatient = VLLMRoutes(slow.receiver.replica, timeout=0.5)
    push = pusher(sync, *replicas)
    push.add([impatient])
    push.push(policy, 2, must_differ=False)
    (reason,) = push.take_lost().values()
    assert "` within trainer.wait_timeout=0.5 s" in reason  # of the whole push
    assert "did not answer `start_weight_update`" in reason or routes == EACH_ROUTE
    assert all(one.holds(policy.weights(), 2) for one in replicas[:2])


@pytest.mark.parametrize("sync", SENDERS)
def test_a_restarted_replica_gets_this_version_and_the_next_one(sync, replicas, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher(sync, *replicas)
    replicas[1].server.faults["/pause"] = refuse
    push.push(policy, 1, must_differ=False)
    assert push.take_lost().keys() == {"inference1"}
    connections = [one.server.routes.count("/init_weight_transfer_engine") for one in replicas]
    replicas[1].server.faults.clear()
    push.add([replicas[1].receiver])
    num_asked = [len(one.server.routes) for one in replicas]
    push.push_again()  # while the trainer waits for a batch
    assert all(one.holds(sent(policy, sync), 1) for one in replicas)
    asked = [len(one.server.routes) > n for one, n in zip(replicas, num_asked, strict=True)]
    assert asked == [False, True, False]
    policy.step()
    push.push(policy, 2, must_differ=True)
    assert all(one.holds(sent(policy, sync), 2) for one in replicas)
    again = [one.server.routes.count("/init_weight_transfer_engine") for one in replicas]
    assert [a - b for a, b in zip(again, connections, strict=True)] == [0, 1, 0]


def test_the_run_ends_with_the_last_replica(replicas, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher("shm", *replicas)
    for one in replicas[:2]:
        one.server.faults["/resume"] = refuse
    push.push(policy, 1, must_differ=False)
    assert push.take_lost().keys() == {"inference0", "inference1"}
    replicas[2].server.faults["/resume"] = refuse
    with pytest.raises(RunFailed, match="no replica is left: inference2: vLLM refused"):
        push.push(policy, 2, must_differ=False)
    with pytest.raises(NoReceiver, match=r"no vLLM answers its health check: see logs/inference"):
        pusher("shm").push(policy, 3, must_differ=False)
    with pytest.raises(NoReceiver, match=r"^vLLM refused `resume`"):
        pusher("shm", replicas[2]).push(policy, 2, must_differ=False)


@pytest.mark.parametrize("every", [1, 2])
def test_probes_of_every_few_versions_take_the_replicas_in_turns(every, replicas):
    push = WeightPusher(opened("shm", probe_every=every))
    push.add([one.receiver for one in replicas])

    def probed(number):
        for one in replicas:
            one.server.routes.clear()
        for version in range((number - 1) * every + 1, number * every):
            assert push.probe(Scorer(0.0), two_rows(), version) == {}
        found = push.probe(Scorer(0.0), two_rows(), number * every)
        assert found["mismatch/max_abs"] == 0
        return [i for i, one in enumerate(replicas) if one.server.routes]

    assert [probed(number) for number in (3, 4, 5, 6)] == [[0], [1], [2], [0]]
    replicas[1].server.faults["/inference/v1/generate"] = refuse
    assert probed(7) == [1, 2]  # two are left, and 7 is odd
    assert push.take_lost().keys() == {"inference1"}
    with pytest.raises(RunFailed, match="compute different logprobs with the weights"):
        push.probe(Scorer(0.5), two_rows(), 8 * every)
