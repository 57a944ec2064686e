"""How ranks of several hosts meet: rank 0 listens on the one address of MASTER_ADDR."""

from datetime import timedelta

import psutil
import pytest
from torch.distributed import rendezvous

from rl.learner.ranks import Ranks, init_method
from rl.runtime.failure import RunFailed
from rl.runtime.network import free_port


def test_a_rank_that_cannot_use_its_gpu_says_why_and_does_not_train_on_the_cpu(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cuda"}
    for name, value in {**variables, "CUDA_VISIBLE_DEVICES": "7"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=r"GPU 0 of CUDA_VISIBLE_DEVICES=7: \w+.*PyTorch"):
        Ranks.join(None, 1.0)


def listening_on(port: int) -> set[str]:
    sockets = psutil.Process().net_connections("inet")
    listening = [one for one in sockets if one.status == psutil.CONN_LISTEN]
    return {one.laddr.ip for one in listening if one.laddr.port == port}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_first_rank_listens_on_master_addr_alone(address, monkeypatch):
    port = free_port("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    met = rendezvous(init_method(0), rank=0, world_size=2, timeout=timedelta(seconds=20))
    store, rank, world = next(met)
    assert (rank, world) == (0, 2)
    assert listening_on(port) == {address}
    store.set("first", "said")
    other, *_ = next(
        rendezvous(init_method(1), rank=1, world_size=2, timeout=timedelta(seconds=20))
    )
    assert other.get("first") == b"said"


@pytest.mark.parametrize(
    ("changed", "rank"),
    [
        ({"MASTER_ADDR": "node-7"}, 0),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, 0),  # torchrun's agent has the port
        ({}, 1),
    ],
)
def test_a_rank_that_does_not_listen_uses_the_environment_as_pytorch_does(
    changed, rank, monkeypatch
):
    there = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", **changed}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    assert init_method(rank) == "env://"
