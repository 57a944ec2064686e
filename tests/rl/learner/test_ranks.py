"""How ranks of several hosts meet, and what they send: rank 0 listens on MASTER_ADDR alone."""

from datetime import timedelta

import deepspeed
import psutil
import pytest
import torch
from torch.distributed import rendezvous

from rl.learner.collectives import gather_bytes
from rl.learner.ranks import Ranks, init_method
from rl.runtime.failure import RunFailed
from rl.runtime.network import free_port
from tests.support.ranks import on_ranks, worlds


def set_variables(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_cannot_use_its_gpu_says_why_and_does_not_train_on_the_cpu(monkeypatch):
    set_variables(monkeypatch, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", DS_ACCELERATOR="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(RunFailed, match=r"GPU 1 of CUDA_VISIBLE_DEVICES=7: \w+.*PyTorch"):
        Ranks.join(None, 1.0)


def test_a_rank_joins_on_its_accelerator_with_a_timeout_in_seconds(monkeypatch, tmp_path):
    set_variables(monkeypatch, RANK="3", WORLD_SIZE="4", DS_ACCELERATOR="cpu")
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
    set_variables(monkeypatch, MASTER_ADDR=address, MASTER_PORT=str(port))
    how = {"world_size": 2, "timeout": timedelta(seconds=20)}
    store, rank, world = next(rendezvous(init_method(0), rank=0, **how))
    assert (rank, world, store.timeout) == (0, 2, how["timeout"])
    assert listening_on(port) == {address}
    store.set("first", "said")
    other, *_ = next(rendezvous(init_method(1), rank=1, **how))
    assert other.get("first") == b"said"


@pytest.mark.parametrize(("address", "rank"), [("node-7", 0), ("10.0.0.7", 1)])
def test_a_rank_that_does_not_listen_uses_the_environment_as_pytorch_does(
    address, rank, monkeypatch
):
    set_variables(monkeypatch, MASTER_ADDR=address, MASTER_PORT="29500")
    assert init_method(rank) == "env://"


SENT = (b"", "ä longer text\0".encode())


@worlds
@on_ranks
def test_every_rank_gets_the_bytes_of_all_in_their_order(setup):
    ranks = setup.ranks
    for sent in (SENT, SENT[::-1]):
        assert gather_bytes(sent[ranks.rank]) == list(sent[: ranks.world])
    words = ["ä first", ""]
    assert ranks.from_first(words[ranks.rank]) == words[0]
    assert ranks.from_first(words[1 - ranks.rank]) == words[1]
    assert ranks.sum(1.5 + ranks.rank) == (1.5, 4.0)[ranks.world - 1]


@worlds
@on_ranks
def test_deepspeed_compiles_no_op_of_its_own(setup):
    from deepspeed.comm.comm import cdb

    assert cdb is not None
    assert cdb.shm_comm_op is None
