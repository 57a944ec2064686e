"""Ports that are kept for vLLMs: theirs before they listen, and as long as they do."""

import socket

import pytest

from rl.inference.listening import Listening
from rl.run.folder import RunFolder
from tests.support.scripted_vllm import ScriptedVLLM


def bound(port: int) -> socket.socket:
    """As vLLM binds it."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", port))
    return one


def test_a_port_that_is_given_back_stays_with_the_vllm_that_listens_on_it(tmp_path):
    folder = RunFolder(tmp_path)
    folder.private.make()
    kept = Listening(folder)
    server = ScriptedVLLM(replicas=1, listen="tcp", startup_timeout=1.0, args={})
    (replica,) = kept.replicas(server)
    port = replica.address.port
    with bound(port) as vllm:
        vllm.listen()
        kept.close()  # before the vLLMs have ended
        with pytest.raises(OSError, match="in use"):
            bound(port)
    bound(port).close()
