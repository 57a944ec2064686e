"""Delivery of a version that no vLLM takes: every rank decides the same, and no step is lost."""

import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from rl.runtime.endpoint import Endpoint, read_restart_request
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.trainer.delivery import Delivery, Receivers
from rl.weights.pusher import NoReceiver, WeightPusher
from tests.rl.weights.test_pusher import OnePolicy, Scorer, two_rows
from tests.support.policy_setup import PlainSteps
from tests.support.ranks import on_ranks, worlds
from tests.support.receiving import opened, refuse, replica
from tests.support.replicas import inference

STATS = {"train/grad_norm": 1.0, "train/learning_rate": 1e-3}
SLOW_S = 1.0  # of the first rank, which alone talks to vLLM
CASES = {  # pushes and probes, x loses the last vLLM; new_replicas; stop asked; result; must_differ
    "live": (".", ".", 0, False, True, [True]),
    "stop after push": ("x", "", 0, True, False, [True]),
    "stop after probe": (".", "x", 0, True, False, [True]),
    "again after push": ("x.", ".", 2, False, True, [True, False]),
    "again after probe": ("..", "x.", 2, False, True, [True, False]),
    "fail": ("x", "", 0, False, "vLLM is out of reach", [True]),
}


class Faulty:
    """Collect as a pusher does; lose the last vLLM on the first rank where a case says so."""

    def __init__(self, first, pushes, probes):
        self.first, self.pushes, self.probes = first, list(pushes), list(probes)
        self.differs = []

    def add(self, receivers):
        pass

    def take_lost(self):
        return {}

    def push(self, policy, version, *, must_differ):
        policy.weights()
        self.differs.append(must_differ)
        self.end(self.pushes.pop(0))

    def probe(self, policy, batch, version):
        policy.logprobs(batch.token_ids[:1])
        self.end(self.probes.pop(0))
        return {"mismatch/mean_abs": 0.0} if self.first else {}

    def end(self, case):
        if self.first and case == "x":
            time.sleep(SLOW_S)
            raise NoReceiver("vLLM is out of reach")


@worlds
@on_ranks
def test_all_ranks_decide_the_same_wherever_the_last_vllm_is_lost(setup):
    policy = setup.policy("float32", "zero3", PlainSteps())
    batch = setup.batch(setup.rows).micro_batches[0]
    for name, (pushes, probes, new_replicas, stop, result, differs) in CASES.items():
        pusher, left = Faulty(setup.ranks.first, pushes, probes), [new_replicas]

        def arrive(pusher=pusher, left=left):
            left[0] -= 1
            return [object()] if left[0] >= 0 and pusher.differs else []

        asked = SimpleNamespace(exists=lambda stop=stop: stop)
        replicas = SimpleNamespace(new_replicas=arrive, updated={}, restart_timeout=0.3)
        run_folder = SimpleNamespace(stop_request=asked)
        one = Delivery(pusher, replicas, policy, setup.ranks, run_folder)
        try:
            found = one.deliver(1, batch, dict(STATS), lambda name, doing: nullcontext())
        except RunFailed as error:
            found = str(error)
        assert (found, pusher.differs) == (result, differs), name


class OneRank:
    """One rank with real routes to vLLMs that keep what they receive."""

    def __init__(self, tmp_path):
        self.folder, self.policy = RunFolder(tmp_path / "run"), OnePolicy(tmp_path / "model")
        self.folder.path.mkdir()
        self.policy.ranks = SimpleNamespace(first=True, from_first=lambda word: word)
        self.policy.logprobs = Scorer(0.0).logprobs
        pusher = WeightPusher(opened("shm"))
        receivers = Receivers(self.folder, inference(2), timeout=30.0)
        self.delivery = Delivery(pusher, receivers, self.policy, self.policy.ranks, self.folder)

    def started(self, vllm):
        """Report that a vLLM listens; from the second time on, that it was restarted."""
        known = Endpoint.read(self.folder, vllm.name)
        incarnation = known.incarnation + 1 if known else 0
        Endpoint(vllm.address, incarnation).write(self.folder, vllm.name)

    def deliver(self, version):
        self.policy.step()
        return self.delivery.deliver(version, two_rows(), dict(STATS), lambda *_: nullcontext())


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
        rank.delivery.begin(0)
        yield served


@pytest.mark.parametrize("route", ["/pause", "/inference/v1/generate"])
def test_a_vllm_that_starts_meanwhile_replaces_the_last(route, rank, vllms):
    """The supervisor ends no run in which another vLLM answers."""
    assert rank.delivery._receivers.restart_timeout == 20.0  # the smaller of both limits

    def fail_as_the_other_one_comes_back():
        rank.started(vllms[1].receiver.replica)
        refuse()

    vllms[1].server.faults["/pause"] = refuse
    assert rank.deliver(1)
    assert rank.delivery.updated_replicas() == {"inference0": 0}
    vllms[1].server.faults.clear()
    vllms[0].server.faults[route] = fail_as_the_other_one_comes_back
    assert rank.deliver(2)
    assert rank.delivery.updated_replicas().keys() == {"inference1"}
    assert vllms[1].server.version == 2
    assert "refused" in (read_restart_request(rank.folder, "inference0", 0) or "")
