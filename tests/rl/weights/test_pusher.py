"""What a push says to vLLM, and what it refuses; vLLM is played by a few lines behind a socket."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl.inference.server import SERVED_AS
from rl.model.loading import load_model
from rl.model.lora import LoRA, adapter_weights, full_weights
from rl.rollouts.plan import plan
from rl.run.failure import RunFailed
from rl.weights.fingerprint import fingerprint
from rl.weights.pusher import WeightPusher, WeightSync
from tests.support import tiny_policy
from tests.support.listening import PostHandler, listening

SYNC = WeightSync(transport="auto", probe_every=1, probe_rows=2, max_mismatch=0.05)
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "modules_to_save": [], "rslora": False}


class Listener(PostHandler):
    """Notes each call, with what lay at the path it names."""

    def answer(self, body):
        read = {}
        if "lora_path" in body:
            folder = Path(body["lora_path"])
            assert folder.stat().st_mode & 0o777 == 0o700
            read = load_file(folder / "adapter_model.safetensors")
        elif path := body.get("update_info", {}).get("path"):
            read = load_file(path)
        self.server.calls.append((self.path, body, read))
        if "lora" in self.path:
            return b"Success"
        scores = [None, *({str(t): {"logprob": -t / 8}} for t in body.get("token_ids", [])[1:])]
        return {"prompt_logprobs": scores}


@pytest.fixture
def vllm(tmp_path):
    with listening(tmp_path / "vllm.sock", Listener) as server:
        server.calls = []
        yield server


class OnePolicy:
    """A policy on one rank that is trained by hand."""

    class ranks:
        first = True

    def __init__(self, folder):
        base = load_model(tiny_policy.model_folder(folder), torch.float32, 0)
        self.model = LoRA(**LORA, target_modules=["q_proj"]).attach(base, 0, "base")
        self.engine = SimpleNamespace(module=self)

    def weights(self):
        return {recipe.name: recipe.make(*recipe.parts) for recipe in full_weights(self.model)}

    def adapter_weights(self):
        return {recipe.name: recipe.make(*recipe.parts) for recipe in adapter_weights(self.model)}


def pusher(transport, tmp_path, **knobs):
    return WeightPusher(SYNC, transport, tmp_path / "vllm.sock", timeout=5.0, **knobs)


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


def test_the_probe_leaves_the_engine_room_for_a_token_of_its_own(vllm, tmp_path):
    found = pusher("shm", tmp_path).probe(Scorer(-0.03125), two_rows(), 1)

    asked = sorted(body["token_ids"] for _, body, _ in vllm.calls)
    assert asked == [[5, 16, 27], [9, 6]]  # a row may fill the context
    assert found == {"mismatch/mean_abs": 0.03125, "mismatch/max_abs": 0.03125}


def test_the_probe_compares_each_token_with_itself(vllm, tmp_path):
    """One position off, in either direction, and neighbours would be compared."""
    assert pusher("shm", tmp_path).probe(Scorer(0.0), two_rows(), 1)["mismatch/max_abs"] == 0


def test_every_probe_is_bounded_and_the_first_most_closely(vllm, tmp_path):
    with pytest.raises(RunFailed, match=r"version 1: mean .* 0.0625 > 0.05 \(sync.max_mismatch"):
        pusher("shm", tmp_path).probe(Scorer(0.0625), two_rows(), 1)
    push = pusher("shm", tmp_path)
    for version, gap in ((1, 0.03125), (2, 0.0625)):
        assert push.probe(Scorer(gap), two_rows(), version)["mismatch/mean_abs"] == gap
    with pytest.raises(RunFailed, match=r"version 3: mean .* 0.1250 > 0.1 .* doubled after"):
        push.probe(Scorer(0.125), two_rows(), 3)


def test_a_run_that_goes_on_has_had_its_first_probe(vllm, tmp_path):
    """Else a healthy run could be stopped and never go on."""
    goes_on = pusher("shm", tmp_path, goes_on=True)
    assert goes_on.probe(Scorer(0.0625), two_rows(), 7)["mismatch/mean_abs"] == 0.0625
    with pytest.raises(RunFailed, match=r"version 8: mean .* 0.1250 > 0.1 .* doubled after"):
        goes_on.probe(Scorer(0.125), two_rows(), 8)


def test_a_batch_in_which_nothing_trains_is_not_compared(vllm, tmp_path):
    (share,) = plan([], step=0, ranks=1, tokens_per_micro_batch=9, metrics={})
    for batch in (share.micro_batches[0], two_rows(np.zeros((2, 4)))):
        assert pusher("shm", tmp_path).probe(Scorer(9.0), batch, 1) == {}


def routes(vllm):
    return [path.partition("?")[0] for path, _, _ in vllm.calls]


def test_an_adapter_is_named_once_and_then_replaced_under_way(vllm, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher("adapter", tmp_path)
    push.connect(policy)
    push.push(policy, 7, must_differ=False)
    assert routes(vllm) == [
        "/v1/load_lora_adapter",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/pause",
        "/update_weights",
        "/update_weight_version",
        "/resume",
    ]
    (_, load, first), (_, init, _), _, _, (_, update, sent), (_, version, _), _ = vllm.calls
    assert load["lora_name"] == SERVED_AS["adapter"]
    assert init["init_info"]["config"]["lora_alpha"] == 4.0
    assert version == {"new_version": "7"}
    assert sent.keys() == first.keys() == policy.adapter_weights().keys()
    assert update["update_info"]["fingerprint"] == fingerprint(sent)


def test_nothing_of_an_adapter_is_left_on_disk(vllm, tmp_path):
    pusher("adapter", tmp_path).connect(OnePolicy(tmp_path / "model"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "vllm.sock"]


def test_all_weights_travel_with_the_adapter_merged_in(vllm, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher("shm", tmp_path)
    push.connect(policy)
    push.push(policy, 7, must_differ=False)
    assert routes(vllm)[1:] == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    sent = vllm.calls[3][2]
    assert sent.keys() == dict(policy.weights()).keys()
    assert vllm.calls[4][1] == {"weight_version": "7"}


@pytest.mark.parametrize("transport", ["shm", "adapter"])
def test_a_step_that_changed_nothing_is_an_error_and_one_that_did_is_not(transport, vllm, tmp_path):
    policy, push = OnePolicy(tmp_path / "model"), pusher(transport, tmp_path)
    push.push(policy, 1, must_differ=False)
    with pytest.raises(RunFailed, match="before version 2 changed no weight"):
        push.push(policy, 2, must_differ=True)
    policy.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data += 1
    push.push(policy, 2, must_differ=True)
    assert routes(vllm).count("/update_weights") == 2


@pytest.mark.parametrize("transport", ["shm", "adapter"])
def test_weights_that_nothing_should_have_changed_may_be_the_same(transport, vllm, tmp_path):
    """After a skipped step, say."""
    policy, push = OnePolicy(tmp_path / "model"), pusher(transport, tmp_path)
    for version in (1, 2):
        push.push(policy, version, must_differ=False)
    assert routes(vllm).count("/update_weights") == 2
