"""The first rank's store listens where MASTER_ADDR says, and other hosts' names are left alone."""

from datetime import timedelta

import psutil
import pytest
from torch.distributed import rendezvous

from rl.learner.meeting import meeting_of
from rl.run.interface import free_port


def listening_on(port: int) -> set[str]:
    sockets = psutil.Process().net_connections("inet")
    listening = [one for one in sockets if one.status == psutil.CONN_LISTEN]
    return {one.laddr.ip for one in listening if one.laddr.port == port}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_first_rank_listens_on_that_address_alone(address, monkeypatch):
    port = free_port("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    met = rendezvous(meeting_of(0), rank=0, world_size=2, timeout=timedelta(seconds=20))
    store, rank, world = next(met)
    assert (rank, world) == (0, 2)
    assert listening_on(port) == {address}
    store.set("first", "said")
    other, *_ = next(rendezvous(meeting_of(1), rank=1, world_size=2, timeout=timedelta(seconds=20)))
    assert other.get("first") == b"said"


@pytest.mark.parametrize(
    ("changed", "rank"),
    [
        ({"MASTER_ADDR": "node-7"}, 0),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, 0),  # torchrun's agent has the port
        ({}, 1),
    ],
)
def test_whoever_does_not_listen_there_meets_as_pytorch_says(changed, rank, monkeypatch):
    there = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", **changed}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    assert meeting_of(rank) == "env://"
