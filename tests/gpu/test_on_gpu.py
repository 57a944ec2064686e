"""Updates and pushes on a GPU give what they give on the CPU; `pytest -m gpu` runs these tests."""

import os
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.first_hour.update import ADAPTER, config
from rl.learner.logprobs import PolicyModule
from rl.learner.ranks import Ranks
from rl.learner.weight_gradients import use_float32_gradients, weight_gradient
from rl.model.loading import compile_layers, enable_gradient_checkpointing
from rl.runtime.devices import gpus_of_driver, visible_gpus
from rl.weights.ipc import IpcSender
from rl.weights.memory_file import MemoryFile, read_weights
from rl.weights.nccl import NcclSender
from rl.weights.packed import checksum
from tests.rl.weights.test_gloo import forms, replica, worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
CUDA = torch.device("cuda")
WAYS = {
    "plain": lambda model: None,
    "checkpointed": enable_gradient_checkpointing,
    "compiled": compile_layers,
}
WEIGHTS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.randn(1 << 22),
    "empty": torch.empty(0, 7),
    "turned": torch.randn(4, 6).T,
}


def gradient(device, way="plain", adapter="none", dtype=torch.float32):
    """Return logprobs and gradients of a small network on a device."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config("0.6b", tiny=True), dtype=dtype)
    model = ADAPTER.attach(model, 0, "none") if adapter == "lora" else model
    WAYS[way](model.to(device).train())
    module = PolicyModule(model, chunk=16, compiled=way == "compiled")
    use_float32_gradients(module)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    token_ids = torch.arange(96, device=device).view(3, 32)
    mask = torch.arange(32, device=device).expand(3, -1) > 8
    logprobs, entropies = module(token_ids, mask, 0.8, entropies=True)
    (logprobs.sum() / len(logprobs)).backward()
    given = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    return logprobs.detach().cpu(), entropies.detach().cpu(), given


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("way", WAYS)
def test_logprobs_and_gradients_in_float32_are_those_of_the_cpu(way, adapter):
    expected, found = gradient(torch.device("cpu"), "plain", adapter), gradient(CUDA, way, adapter)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", ["checkpointed", "compiled"])
def test_in_bfloat16_each_way_of_computing_the_layers_gives_the_same_gradient(way):
    half = torch.bfloat16
    expected, found = (gradient(CUDA, how, dtype=half)[2] for how in ("plain", way))
    assert all(grad.dtype == torch.float32 for grad in found.values())
    for name, grad in found.items():
        assert (grad - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_the_gradient_of_a_weight_is_not_rounded_to_bfloat16():
    grads, inputs = (torch.randn(512, 64, device=CUDA).bfloat16() for _ in range(2))
    exact = grads.double().T @ inputs.double()
    total = torch.ones_like(exact).float()
    for found in (weight_gradient(grads, inputs), weight_gradient(grads, inputs, total) - 1):
        assert (found.double() - exact).norm() < 1e-5 * exact.norm()


def test_a_rank_joins_on_the_gpu_that_it_was_given(monkeypatch, tmp_path):
    pytest.importorskip("deepspeed")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    ranks = Ranks.join(tmp_path / "rendezvous", 60.0)
    assert ranks.device.type == "cuda"
    assert ranks.sum(1.5) == 1.5
    torch.distributed.destroy_process_group()


def test_the_gpus_that_nvidia_smi_lists_are_those_that_pytorch_counts():
    assert len(visible_gpus()) == torch.cuda.device_count()
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        sizes = [gpu.memory or 0 for gpu in gpus_of_driver()]
        assert sizes[0] >= torch.cuda.get_device_properties(0).total_memory


def test_weights_that_a_gpu_copies_into_their_places_are_read_from_the_memory_file():
    weights = {"a": torch.randn(5, 7, device=CUDA), "b": torch.randn(3, device=CUDA).bfloat16()}
    with closing(MemoryFile()) as file:
        before = file.write(weights)
        assert all(view.is_pinned() for view in file.views.values())  # CUDA knows the memory
        weights["b"][2] = 100
        for name, place in file.views.items():
            place.copy_(weights[name])
        after = file.write(file.views)
        assert after != before
        found = read_weights(file.path, after)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.cpu())


def last_gpu_worker(number, calls):
    torch.cuda.set_device(torch.cuda.device_count() - 1 - number)
    worker(number, calls)


def push(kind, num_workers):
    sender = kind(probe_every=0, probe_rows=1, max_mismatch=1.0)
    sender.open(120.0)
    with replica(num_workers, last_gpu_worker) as vllm:
        for step in range(2):
            weights = {name: tensor.cuda() * (1 + step) for name, tensor in WEIGHTS.items()}
            mark = sender.pack(weights)
            if step == 0:
                sender.connect(vllm)
            sender.send(vllm, step)
            # Each worker has compared the fingerprint of what it received on its GPU.
            assert vllm.answers == [forms(weights)] * num_workers
            assert mark == sender.push_info(vllm)["fingerprint"]
            assert {place.device.type for place in sender._packed.values()} == {"cuda"}


def test_weights_reach_another_process_on_the_same_or_another_gpu_by_cuda_ipc():
    push(IpcSender, 1)


def test_weights_reach_another_process_that_shares_an_allocator_of_expandable_segments(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    push(IpcSender, 2 if torch.cuda.device_count() > 1 else 1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_weights_reach_the_workers_on_other_gpus_by_nccl(num_workers):
    if torch.cuda.device_count() <= num_workers:
        pytest.skip(f"needs {1 + num_workers} GPUs, because NCCL takes one for each rank")
    push(NcclSender, num_workers)


def test_the_checksum_on_a_gpu_is_that_on_the_cpu():
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (5_000_000,))
    assert int(checksum(words.cuda())) == int(checksum(words))
