"""A head of Ray that falls silent is one sentence, before Ray ends the supervisor."""

import socket
import time

import pytest

from rl.cluster.ray_head import RayHead
from rl.runtime.failure import RunFailed
from tests.support.families import wait_until

SILENT_S = 0.1


def looked(head: RayHead) -> bool:
    head.look()
    return False


def test_a_head_that_answers_or_is_silent_for_a_moment_is_no_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        head = RayHead(address, SILENT_S)
        assert not wait_until(lambda: looked(head), 3 * SILENT_S)
    patient = RayHead(address)
    assert not wait_until(lambda: looked(patient), 3 * SILENT_S)


def test_a_single_missed_look_after_a_long_pause_is_no_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = RayHead(f"127.0.0.1:{listener.getsockname()[1]}", SILENT_S)
    time.sleep(2 * SILENT_S)  # a reservation that takes its time
    head.look()


def test_a_silent_head_is_one_sentence_and_gets_no_more_calls():
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        head = RayHead(address, SILENT_S)
        head.unless_lost(asked.append, "before")
    with pytest.raises(RunFailed, match=f"Ray's head at tcp://{address} has not answered for 0.1"):
        wait_until(lambda: looked(head), 5.0)
    with pytest.raises(RunFailed):  # at once
        head.look()
    head.unless_lost(asked.append, "after")
    assert asked == ["before"]
