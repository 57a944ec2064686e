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


@pytest.mark.parametrize("route", ["/pause", "/inference/v1/generate"])
def test_a_vllm_that_starts_meanwhile_replaces_the_last(route, tmp_path):
    """The supervisor ends no run in which another vLLM answers."""
    folder, policy = RunFolder(tmp_path / "run"), OnePolicy(tmp_path / "model")
    folder.path.mkdir()
    policy.ranks = SimpleNamespace(first=True, from_first=lambda word: word)
    policy.logprobs = Scorer(0.0).logprobs
    receivers = Receivers(folder, inference(2), timeout=30.0)
    assert receivers.restart_timeout == 20.0  # the smaller of both limits
    delivery = Delivery(WeightPusher(opened("shm")), receivers, policy, policy.ranks, folder)

    def started(vllm, incarnation):
        """Report that a vLLM listens, after so many restarts."""
        known = vllm.receiver.replica
        Endpoint(known.address, incarnation).write(folder, known.name)

    def deliver(version):
        policy.step()
        return delivery.deliver(version, two_rows(), dict(STATS), lambda *_: nullcontext())

    def fail_as_the_other_one_comes_back():
        started(other, 1)
        refuse()

    names = ("inference0", "inference1")
    with ExitStack() as stack:
        last, other = (stack.enter_context(replica(tmp_path / name, name)) for name in names)
        started(last, 0)
        started(other, 0)
        delivery.begin(0)
        other.server.faults["/pause"] = refuse
        assert deliver(1)
        assert delivery.updated_replicas() == {"inference0": 0}
        other.server.faults.clear()
        last.server.faults[route] = fail_as_the_other_one_comes_back
        assert deliver(2)
        assert delivery.updated_replicas() == {"inference1": 1}
        assert other.server.version == 2
    assert "refused" in (read_restart_request(folder, "inference0", 0) or "")
