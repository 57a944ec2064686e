"""How ranks of several hosts meet, and what they send: rank 0 listens on MASTER_ADDR alone."""

from datetime import timedelta

import psutil
import pytest
from torch.distributed import rendezvous

from rl.learner.collectives import gather_bytes
from rl.learner.ranks import Ranks, init_method
from rl.runtime.failure import RunFailed
from rl.runtime.network import free_port
from tests.support.ranks import on_ranks, worlds


def test_a_rank_that_cannot_use_its_gpu_says_why_and_does_not_train_on_the_cpu(monkeypatch):
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "DS_ACCELERATOR": "cuda"}
    for name, value in (given | {"CUDA_VISIBLE_DEVICES": "7"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=r"GPU 1 of CUDA_VISIBLE_DEVICES=7: \w+.*PyTorch"):
        Ranks.join(None, 1.0)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_first_rank_listens_on_master_addr_alone(address, monkeypatch):
    port = free_port("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    how = {"world_size": 2, "timeout": timedelta(seconds=20)}
    store, rank, world = next(rendezvous(init_method(0), rank=0, **how))
    assert (rank, world, store.timeout) == (0, 2, how["timeout"])
    sockets = psutil.Process().net_connections("inet")
    listening = {s.laddr.ip for s in sockets if s.status == "LISTEN" and s.laddr.port == port}
    assert listening == {address}
    store.set("first", "said")
    other, *_ = next(rendezvous(init_method(1), rank=1, **how))
    assert other.get("first") == b"said"
    # At a name PyTorch listens on all addresses, because the name may mean loopback here.
    monkeypatch.setenv("MASTER_ADDR", "node-7")
    assert init_method(0) == "env://"


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
