"""A push to one replica, and to several: a failed one does not delay the others."""

import time
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.model.loading import load_model
from rl.model.lora import LoRA, adapter_recipes, full_recipes
from rl.rollouts.plan import plan
from rl.runtime.failure import RunFailed
from rl.weights.adapter import AdapterReader
from rl.weights.probe import MismatchBound
from rl.weights.pusher import NoReceiver, WeightPusher
from rl.weights.transport import open_reader
from tests.support import tiny_policy
from tests.support.receiving import SENDERS, WHOLE, opened, refuse, replica

LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "modules_to_save": [], "rslora": False}
torch.set_num_threads(1)


@pytest.fixture
def vllm(tmp_path):
    with replica(tmp_path / "vllm.sock") as served:
        yield served


class OnePolicy:
    """A policy on one rank; a test changes its weights."""

    def __init__(self, folder, dtype=torch.float32, *, first=True):
        self.ranks = SimpleNamespace(first=first)
        base = load_model(tiny_policy.model_folder(folder), dtype, 0)
        self.model = LoRA(**LORA, target_modules=["q_proj"]).attach(base, 0, "base")
        self.engine = SimpleNamespace(module=self)

    def weights(self, buffers=None):
        return {recipe.name: recipe.make(*recipe.parts) for recipe in full_recipes(self.model)}

    def adapter_weights(self):
        return {recipe.name: recipe.make(*recipe.parts) for recipe in adapter_recipes(self.model)}

    def step(self):
        self.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data += 1


def pusher(sync, *replicas, **options):
    push = WeightPusher(opened(sync), **options)
    push.add([one.receiver for one in replicas])
    return push


class Scorer:
    """A policy that gives every token the logprob that the server gives it, plus `gap`."""

    class ranks:
        first = True

    def __init__(self, gap):
        self.gap = gap

    def logprobs(self, token_ids):
        scores = torch.tensor(token_ids) / -8 + self.gap
        scores[:, 0] = 0  # nothing precedes the first
        return scores


def two_rows(chosen=((0, 0, 1, 1), (0, 0, 1, 0))):
    token_ids = np.array([[5, 16, 27, 38], [9, 6, 70, 0]], np.int32)
    return SimpleNamespace(token_ids=token_ids, completion_mask=np.array(chosen, np.bool_))


def test_the_probe_compares_each_token_with_itself(vllm, monkeypatch):
    asked, score = [], vllm.receiver.score
    noted = lambda model, ids: asked.append(ids) or score(model, ids)  # noqa: E731
    monkeypatch.setattr(vllm.receiver, "score", noted)
    push = pusher("shm", vllm)
    gap = torch.tensor([9, 0.015625, -0.0625])  # 0.015625 at the second token of both rows
    found = push.probe(Scorer(gap), two_rows(), 1)
    assert sorted(asked) == [[5, 16, 27], [9, 6]]  # a row may fill the context
    assert found == {"mismatch/mean_abs": 0.03125, "mismatch/max_abs": 0.0625}
    assert push.probe(Scorer(0.0), two_rows(), 1)["mismatch/max_abs"] == 0


@pytest.mark.parametrize(
    ("resumed", "fine", "gap", "said"),
    [
        (False, [], 0.0625, r"0.0625, and at most 0.05 is .*\(sync"),
        (False, [], float("nan"), "nan, and at most 0.05 is allowed"),
        (False, [0.03125, 0.0625], 0.125, r"0.1250, and at most 0.1 is .*\(sync"),
        (True, [0.0625], 0.125, r"0.1250, and at most 0.1 is .*\(sync"),
        (True, [0.0078125], 0.0625, r"at most 0.0390625 is .* adapted to the first probe\)"),
        (False, [0.0], 0.0625, r"at most 0.025 is .* adapted to the first probe\)"),
    ],
)
def test_every_probe_is_bounded_and_later_ones_by_the_first(resumed, fine, gap, said, vllm):
    push = pusher("shm", vllm, resumed=resumed)
    for version, small in enumerate(fine, 1):
        assert push.probe(Scorer(small), two_rows(), version)["mismatch/mean_abs"] == small
    version = len(fine) + 1
    with pytest.raises(RunFailed, match=f"version {version}: .* {said}"):
        push.probe(Scorer(gap), two_rows(), version)
    exact = MismatchBound(0.0625, resumed=False)  # a probe may be as large as its bound
    for version, gap in ((1, 0.0625), (2, 0.125)):
        assert exact.check(torch.tensor([gap]), version)["mismatch/mean_abs"] == gap


def test_a_batch_in_which_nothing_trains_is_not_compared(vllm):
    (share,) = plan([], step=0, ranks=1, tokens_per_micro_batch=9, metrics={})
    for batch in (share.micro_batches[0], two_rows(np.zeros((2, 4)))):
        assert pusher("shm", vllm).probe(Scorer(9.0), batch, 1) == {}


def test_vllm_loads_an_adapter_once_and_later_pushes_replace_it(vllm, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher("adapter", vllm)
    push.push(policy, 7, must_differ=False)
    assert vllm.holds(policy.adapter_weights(), 7)
    policy.step()
    push.push(policy, 8, must_differ=True)
    once = ["/start_weight_update", "/init_weight_transfer_engine", "/v1/load_lora_adapter"]
    each = ["/pause", "/update_weights", "/update_weight_version", "/resume"]
    assert vllm.server.routes == once + each + each
    assert vllm.server.form["lora_alpha"] == 4.0
    assert vllm.server.first.keys() == policy.adapter_weights().keys()
    assert vllm.holds(policy.adapter_weights(), 8)
    assert SERVED_AS[True] != SERVED_AS[False]
    # Any other worker reads the same source, and writes nothing.
    second = AdapterReader(1, form={}, folder=str(tmp_path / "second"), fingerprint="", source={})
    read = second.read(push._last, **push._sender.source(vllm.receiver))
    assert read.keys() == policy.adapter_weights().keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "vllm.sock"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sync", WHOLE)
def test_all_weights_arrive_with_the_adapter_merged_in(sync, dtype, vllm, tmp_path):
    policy = OnePolicy(tmp_path / "model", dtype)
    push = pusher(sync, vllm)
    push.push(policy, 7, must_differ=False)
    assert vllm.holds(policy.weights(), 7)
    policy.step()
    push.push(policy, 8, must_differ=True)
    assert vllm.holds(policy.weights(), 8)
    each = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert vllm.server.routes[-10:] == each + each


@pytest.mark.parametrize("sync", SENDERS)
def test_a_rank_that_is_not_the_first_only_collects(sync, vllm, tmp_path):
    push = pusher(sync, vllm)
    push.push(OnePolicy(tmp_path / "model", first=False), 1, must_differ=False)
    assert vllm.server.routes == []


@pytest.mark.parametrize("sync", ["shm", "adapter"])
def test_a_step_that_changed_nothing_is_an_error_unless_it_was_skipped(sync, vllm, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher(sync, vllm)
    for version in (0, 1):
        push.push(policy, version, must_differ=False)
    with pytest.raises(RunFailed, match="all weights of version 2 equal the previous"):
        push.push(policy, 2, must_differ=True)
    policy.step()
    push.push(policy, 2, must_differ=True)
    assert vllm.server.routes.count("/update_weights") == 3


def test_a_push_replaces_what_a_trainer_that_was_killed_has_left_open(vllm, tmp_path):
    policy, refused = OnePolicy(tmp_path / "model"), []

    def once():
        if not refused:
            refused.append(1)
            raise RuntimeError("a weight update is already active")

    vllm.server.faults["/start_weight_update"] = once
    pusher("shm", vllm).push(policy, 3, must_differ=False)
    assert vllm.holds(policy.weights(), 3)


def test_a_request_cannot_make_vllm_call_anything_but_a_reader():
    for target in ("builtins.print", "builtins.dict"):
        with pytest.raises(RuntimeError, match=f"{target} cannot receive weights"):
            open_reader(target, 0, {})


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
