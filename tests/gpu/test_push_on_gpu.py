"""Weights go from the memory of one GPU to another process; `pytest -m gpu` runs these tests."""

import pytest
import torch

from rl.weights.ipc import IpcSender
from rl.weights.nccl import NcclSender
from tests.rl.weights.test_gloo import forms, replica, worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WEIGHTS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.randn(1 << 22),
    "empty": torch.empty(0, 7),
    "turned": torch.randn(4, 6).T,
}


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
    from rl.weights.packed import checksum

    words = torch.randint(-(1 << 63), (1 << 63) - 1, (5_000_000,))
    assert int(checksum(words.cuda())) == int(checksum(words))
