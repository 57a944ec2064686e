"""Bytes between ranks."""

from rl.learner.collectives import gather_bytes
from tests.support.ranks import on_ranks, worlds

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
