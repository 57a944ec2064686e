"""A version that reaches nobody: every rank goes the same way, and nothing learned is lost."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from rl.run.endpoint import Endpoint, restart_request
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.trainer import delivery
from rl.trainer.delivery import Delivery
from rl.trainer.replicas import PushedReplicas
from rl.weights.pusher import WeightPusher
from tests.rl.weights.test_pusher import SYNC, OnePolicy, Scorer, two_rows
from tests.support.ranks import measurements
from tests.support.receiving import refuse, replica

STATS = {"train/grad_norm": 1.0, "train/learning_rate": 1e-3}
ENDS = {  # what `bring` comes to, and whether each push was to find other weights than the last
    "live": [True, [True]],
    "stop after push": [False, [True]],
    "stop after probe": [False, [True]],
    "again after push": [True, [True, False]],
    "again after probe": [True, [True, False]],
    "fail": ["vLLM is out of reach", [True]],
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_come_to_the_same_end_wherever_the_last_vllm_is_lost(ranks, end):
    assert measurements(ranks)["deliveries"][end] == [ENDS[end]] * ranks


class OneRank:
    """With real routes to vLLMs that only keep what came."""

    def __init__(self, tmp_path):
        self.folder, self.policy = RunFolder(tmp_path / "run"), OnePolicy(tmp_path / "model")
        self.folder.path.mkdir()
        self.policy.ranks = SimpleNamespace(first=True, told=lambda word: word)
        self.policy.logprobs = Scorer(0.0).logprobs
        pusher = WeightPusher(SYNC, "disk", [], folder=tmp_path / "weights", timeout=30.0)
        replicas = PushedReplicas(self.folder, {"replicas": 2}, timeout=30.0)
        self.delivery = Delivery(pusher, replicas, self.policy, self.policy.ranks, self.folder)

    def started(self, vllm):
        """Say that it listens, since another of its starts if it did before."""
        known = Endpoint.read(self.folder, vllm.name)
        incarnation = known.incarnation + 1 if known else 0
        Endpoint(vllm.address, incarnation).write(self.folder, vllm.name)

    def bring(self, version):
        self.policy.step()
        return self.delivery.bring(
            version, two_rows(), dict(STATS), lambda name, doing: nullcontext()
        )


@pytest.fixture
def rank(tmp_path):
    return OneRank(tmp_path)


@pytest.fixture
def vllms(tmp_path, rank):
    with ExitStack() as stack:
        names = ["inference0", "inference1"]
        served = [stack.enter_context(replica(tmp_path / f"{name}.sock", name)) for name in names]
        for one in served:
            rank.started(one.receiver.replica)
        rank.delivery.begin(0, 30.0)
        yield served


@pytest.mark.parametrize("route", ["/pause", "/inference/v1/generate"])
def test_one_that_has_started_meanwhile_takes_the_place_of_the_last(route, rank, vllms):
    """The supervisor ends no run in which another one answers, with whatever weights."""

    def fail_as_the_other_one_comes_back():
        rank.started(vllms[1].receiver.replica)
        refuse()

    vllms[1].server.faults["/pause"] = refuse
    assert rank.bring(1)
    assert rank.delivery.living() == {"inference0": 0}
    vllms[1].server.faults.clear()
    vllms[0].server.faults[route] = fail_as_the_other_one_comes_back
    assert rank.bring(2)
    assert rank.delivery.living().keys() == {"inference1"}
    assert vllms[1].server.version == 2
    assert "refused" in (restart_request(rank.folder, "inference0", 0) or "")


@pytest.mark.parametrize("stop", [True, False])
def test_the_supervisor_hears_of_the_last_and_decides(stop, rank, vllms, monkeypatch):
    monkeypatch.setattr(delivery, "_NOTICED_S", 0.3)
    if stop:
        rank.folder.stop_request.touch()
    for one in vllms:
        one.server.faults["/resume"] = refuse
    with nullcontext() if stop else pytest.raises(RunFailed, match="no replica is left"):
        assert rank.bring(1) is False
    for one in vllms:
        why = restart_request(rank.folder, one.receiver.replica.name, 0)
        assert why is not None
        assert "refused `resume`" in why
