"""A push to one replica: the weights, the routes, and the refusals."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.inference.server import SERVED_AS
from rl.model.loading import load_model
from rl.model.lora import LoRA, adapter_recipes, full_recipes
from rl.rollouts.plan import plan
from rl.runtime.failure import RunFailed
from rl.weights.adapter import AdapterReader
from rl.weights.probe import MismatchBound
from rl.weights.pusher import WeightPusher
from rl.weights.transport import open_reader
from tests.support import tiny_policy
from tests.support.receiving import SENDERS, WHOLE, opened, replica

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
