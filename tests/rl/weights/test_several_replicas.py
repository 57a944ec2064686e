"""A push to several replicas: each gets it whole, and one that fails holds up nobody."""

import time
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from rl.inference.routes import VLLMRoutes
from rl.run.failure import RunFailed
from rl.weights.fingerprint import fingerprint
from tests.rl.weights.test_pusher import WHOLE, OnePolicy, Scorer, pusher, two_rows
from tests.support.receiving import refuse, replica

EVERY = [*WHOLE, "adapter"]


@pytest.fixture
def replicas(tmp_path):
    with ExitStack() as stack:
        names = ["inference0", "inference1", "inference2"]
        yield [stack.enter_context(replica(tmp_path / f"{name}.sock", name)) for name in names]


def sent(policy, transport):
    return policy.adapter_weights() if transport == "adapter" else policy.weights()


def lost(push):
    return {one.name: one.reason for one in push.lost()}


@pytest.mark.parametrize("transport", EVERY)
def test_every_replica_gets_every_version(transport, replicas, tmp_path):
    policy, push = OnePolicy(tmp_path / "model", torch.bfloat16), None
    push = pusher(transport, tmp_path, *replicas)
    for version in (3, 4):
        push.push(policy, version, must_differ=version > 3)
        assert all(one.holds(sent(policy, transport), version) for one in replicas)
        policy.step()
    assert lost(push) == {}


@pytest.mark.parametrize("transport", ["gloo", "adapter"])
def test_a_replica_on_a_port_needs_no_folder_and_no_memory_of_ours(transport, tmp_path):
    policy = OnePolicy(tmp_path / "model", torch.bfloat16)
    with replica(None, "inference0") as near, replica(None, "inference1") as far:
        push = pusher(transport, tmp_path, near, far)
        for version in (1, 2):
            push.push(policy, version, must_differ=version > 1)
            assert all(one.holds(sent(policy, transport), version) for one in (near, far))
            policy.step()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if transport == "adapter":
        assert near.server.folder != far.server.folder
        assert not near.server.folder.exists()


FAULTS = {
    "read something else": ("lie", "0123", "the trainer wrote 0123, vLLM read {mark}"),
    "refused": ("/update_weights", refuse, "it refuses"),
    "could not open its end": ("/init_weight_transfer_engine", refuse, "it refuses"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", EVERY)
def test_one_that_fails_is_named_and_the_others_go_on(transport, fault, replicas, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher(transport, tmp_path, *replicas)
    bad, where = replicas[1], FAULTS[fault][0]
    if where == "lie":
        push.push(policy, 1, must_differ=False)  # an adapter's reader checks what it opens with
        bad.server.lie = FAULTS[fault][1]
    else:
        bad.server.faults[where] = FAULTS[fault][1]
    push.push(policy, 2, must_differ=False)
    mark = fingerprint(sent(policy, transport))
    (name, reason), *others = lost(push).items()
    assert (name, others) == ("inference1", [])
    assert FAULTS[fault][2].format(mark=mark) in reason
    assert all(one.holds(sent(policy, transport), 2) for one in (replicas[0], replicas[2]))
    if where == "lie":  # what it had is what it keeps
        assert bad.server.version == 1

    asked = len(bad.server.routes)
    push.push(policy, 3, must_differ=False)
    assert len(bad.server.routes) == asked
    assert lost(push) == {}


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_one_that_does_not_answer_in_time_is_left_behind(transport, replicas, tmp_path):
    policy, slow = OnePolicy(tmp_path / "model"), replicas[2]
    slow.server.faults["/start_weight_update"] = partial(time.sleep, 1.0)
    impatient = VLLMRoutes(slow.receiver.replica, timeout=0.5)
    push = pusher(transport, tmp_path, *replicas)
    push.join([impatient])
    push.push(policy, 2, must_differ=False)
    (reason,) = lost(push).values()
    assert "did not answer `start_weight_update` within trainer.wait_timeout=0.5 s" in reason
    assert all(one.holds(policy.weights(), 2) for one in replicas[:2])


@pytest.mark.parametrize("transport", EVERY)
def test_one_that_was_started_again_gets_the_next_version_with_the_others(
    transport, replicas, tmp_path
):
    policy, push = OnePolicy(tmp_path / "model"), pusher(transport, tmp_path, *replicas)
    replicas[1].server.faults["/pause"] = refuse
    push.push(policy, 1, must_differ=False)
    assert lost(push).keys() == {"inference1"}
    connections = [one.server.routes.count("/init_weight_transfer_engine") for one in replicas]
    replicas[1].server.faults.clear()
    policy.step()
    push.join([replicas[1].receiver])
    push.push(policy, 2, must_differ=True)
    assert all(one.holds(sent(policy, transport), 2) for one in replicas)
    again = [one.server.routes.count("/init_weight_transfer_engine") for one in replicas]
    assert [a - b for a, b in zip(again, connections, strict=True)] == [0, 1, 0]


def test_the_run_ends_with_the_last_of_them(replicas, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher("disk", tmp_path, *replicas)
    for one in replicas[:2]:
        one.server.faults["/resume"] = refuse
    push.push(policy, 1, must_differ=False)
    assert lost(push).keys() == {"inference0", "inference1"}
    replicas[2].server.faults["/resume"] = refuse
    with pytest.raises(RunFailed, match="no replica is left: inference2: vLLM refused"):
        push.push(policy, 2, must_differ=False)
    assert not (tmp_path / "weights").exists()


def test_probes_take_turns_and_go_on_without_one_that_does_not_answer(replicas, tmp_path):
    push = pusher("shm", tmp_path, *replicas)

    def probed(version):
        for one in replicas:
            one.server.routes.clear()
        assert push.probe(Scorer(0.0), two_rows(), version)["mismatch/max_abs"] == 0
        return [i for i, one in enumerate(replicas) if one.server.routes]

    assert [probed(version) for version in (3, 4, 5, 6)] == [[0], [1], [2], [0]]
    replicas[1].server.faults["/inference/v1/generate"] = refuse
    assert probed(7) == [1, 2]  # two are left, of which the seventh is the second
    assert lost(push).keys() == {"inference1"}


def test_a_probe_that_differs_ends_the_run_however_many_there_are(replicas, tmp_path):
    push = pusher("shm", tmp_path, *replicas)
    with pytest.raises(RunFailed, match="disagree on the weights"):
        push.probe(Scorer(0.5), two_rows(), 1)
