"""How ranks of several hosts meet: rank 0 listens on the one address of MASTER_ADDR."""

from datetime import timedelta

import deepspeed
import psutil
import pytest
import torch
from torch.distributed import rendezvous

from rl.learner.ranks import Ranks, init_method
from rl.runtime.failure import RunFailed
from rl.runtime.network import free_port


def test_a_rank_that_cannot_use_its_gpu_says_why_and_does_not_train_on_the_cpu(monkeypatch):
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "DS_ACCELERATOR": "cuda"}
    for name, value in {**variables, "CUDA_VISIBLE_DEVICES": "7"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=r"GPU 1 of CUDA_VISIBLE_DEVICES=7: \w+.*PyTorch"):
        Ranks.join(None, 1.0)


def test_a_rank_joins_on_its_accelerator_with_a_timeout_in_seconds(monkeypatch, tmp_path):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    given = {}
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **options: given.update(options))
    assert Ranks.join(tmp_path / "meeting", 90.0) == Ranks(3, 4, torch.device("cpu"))
    assert given["timeout"] == timedelta(seconds=90)
    assert (given["rank"], given["world_size"], given["dist_backend"]) == (3, 4, "gloo")
    assert given["init_method"] == f"file://{tmp_path / 'meeting'}"


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
    assert (rank, world, store.timeout) == (0, 2, timedelta(seconds=20))
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
