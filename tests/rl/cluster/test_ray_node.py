"""Our process on a Ray node, tested without Ray: its processes, and what it reports as missing."""

import os
import sys
from hashlib import sha256
from types import SimpleNamespace

import pytest

from rl.cluster import ray_node
from rl.cluster.bundles import Bundle
from rl.cluster.host import Start
from rl.cluster.ray_host import RayHost
from rl.cluster.ray_node import RayNode


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setattr(ray_node, "_NEW_FILE_TIMEOUT_S", 0.2)
    monkeypatch.chdir(os.getcwd())  # the node changes the working folder
    node = RayNode()
    yield node
    node.end()


@pytest.fixture
def key(tmp_path):
    (tmp_path / "key").write_text("secret")
    return tmp_path / "key", sha256(b"secret").hexdigest()


def test_a_complete_node_changes_to_the_supervisors_folder(node, key, tmp_path):
    assert node.prepare(*key, sys.executable, str(tmp_path)) == ""
    assert os.getcwd() == str(tmp_path)


def test_a_node_says_what_it_lacks(node, key, tmp_path):
    path, digest = key
    here = str(tmp_path)
    assert "does not see" in node.prepare(tmp_path / "no", digest, sys.executable, here)
    other = sha256(b"of another run").hexdigest()  # another folder at the same path
    assert "set output_dir to" in node.prepare(path, other, sys.executable, here)
    assert "has no /no/python" in node.prepare(path, digest, "/no/python", here)
    assert f"has no {here}/no" in node.prepare(path, digest, sys.executable, f"{here}/no")


def test_a_host_has_the_address_of_its_interface_and_the_gpus_of_its_bundle():
    def remote(answer):
        return SimpleNamespace(remote=lambda *given: lambda: answer(*given))

    node = SimpleNamespace(address=remote(lambda name: f"of {name}"), devices=remote(lambda: ["3"]))
    node.free_port = remote(lambda address: (address, 7))
    ray = SimpleNamespace(get=lambda future, timeout: future(), exceptions=ray_errors())
    for interface, gpus, address, devices in (("eth1", 1, "of eth1", ("3",)), (None, 0, "a", ())):
        host = RayHost(ray, node, "a", Bundle(gpus, 2), interface)
        assert (host.address, host.devices) == (address, devices)
        assert host.free_port() == (address, 7)


def ray_errors() -> SimpleNamespace:
    names = ("RayActorError", "GetTimeoutError", "RayTaskError")
    return SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})


def test_temporary_files_are_local_to_the_node_and_deleted_with_it(node, tmp_path):
    log = tmp_path / "logs" / "part.log"
    number = node.start(Start("part", ["sh", "-c", "echo $TMPDIR"], log, {"TMPDIR": "/elsewhere"}))
    node._host.children[number]._process.wait()
    folder = log.read_text().strip()
    assert os.path.isdir(folder)
    assert node.returncodes() == [0]
    node.end()
    assert not os.path.exists(folder)
