"""Addresses of servers as text and as files, and the key of a run."""

import os
import socket
from pathlib import Path

import pytest

from rl.runtime.endpoint import Endpoint, read_restart_request, request_restart
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address, bind_collectives, own_address


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("unix:/run/a b.sock", Address(path=Path("/run/a b.sock")), "http://vllm"),
        ("tcp://127.0.0.1:80", Address(host="127.0.0.1", port=80), "http://127.0.0.1:80"),
        ("tcp://node-3:65535", Address(host="node-3", port=65535), "http://node-3:65535"),
        ("tcp://[::1]:8000", Address(host="::1", port=8000), "http://[::1]:8000"),
    ],
)
def test_an_address_is_parsed_and_formatted(text, address, url):
    assert Address.parse(text) == address
    assert (str(address), address.url) == (text, url)


def test_a_wrong_address_is_refused_with_the_right_form():
    wrong = "unix: unix:a.sock tcp://host tcp://:80 tcp://h:0 tcp://h:99999 tcp://h:x http://h:80"
    for text in ("", *wrong.split(), "tcp://h:80/v1", "/run/a.sock"):
        with pytest.raises(ValueError, match=r"write unix:/path or tcp://host:port"):
            Address.parse(text)


def test_a_connection_needs_a_listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        unix.bind(str(tmp_path / "s"))
        tcp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        addresses = (Address(path=tmp_path / "s"), Address(host="127.0.0.1", port=port))
        for listener, address in zip((unix, tcp), addresses, strict=True):
            with pytest.raises(ConnectionRefusedError):
                address.connect(1)
            listener.listen()
            with address.connect(5) as opened:
                assert opened.gettimeout() == 5


def test_each_start_of_a_server_is_published_until_the_next_run(tmp_path):
    folder = RunFolder(tmp_path)
    assert Endpoint.read(folder, "inference1") is None
    folder.endpoints.mkdir()
    request_restart(folder, "inference1", 2, "it hangs")
    requests = [("inference1", 2), ("inference1", 1), ("inference1", 3), ("inference0", 2)]
    answers = [read_restart_request(folder, *request) for request in requests]
    assert answers == ["it hangs", None, None, None]
    for incarnation in (0, 1):
        started = Endpoint(Address(host="::1", port=7), incarnation, pid=12)
        started.write(folder, "inference1")
        assert Endpoint.read(folder, "inference1") == started
    Endpoint(started.address).write(folder, "rollouts")
    assert Endpoint.read(folder, "rollouts") == Endpoint(started.address, 0, os.getpid())
    folder.clear_process_files()
    assert Endpoint.read(folder, "inference1") is None


def test_a_host_has_an_address_on_an_interface_that_collectives_use(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    bind_collectives(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "before"
    bind_collectives("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert own_address("lo") == "127.0.0.1"
    with pytest.raises(RunFailed, match=r"=none9 has no IPv4 address: use one of .*\blo\b"):
        own_address("none9")
