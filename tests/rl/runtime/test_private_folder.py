"""Another user of the machine cannot reach what a run keeps for itself."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rl.runtime.files import write_private
from rl.runtime.folder import RunFolder
from rl.weights.memory_file import MemoryFile

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
DENIED, NOBODY = "Permission denied", 65534


def as_another_user(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Call each attempt in a process of another user; return its result or its error as text."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write, json.dumps({n: _outcome(a) for n, a in attempts.items()}).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        results = json.loads(file.read())
    os.waitpid(child, 0)
    return results


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        return str(attempt())
    except OSError as error:
        return str(error.strerror)


@pytest.fixture(params=["run", "run" * 40], ids=["short", "too long for a socket"])
def run_folder(request, monkeypatch):
    """Yield a run folder that everybody may read, made under a umask that protects nothing."""
    umask = os.umask(0)
    top = Path(tempfile.mkdtemp(dir="/tmp"))  # others cannot enter pytest's folders
    top.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(top))
    folder = RunFolder(top / request.param)
    folder.path.mkdir()
    folder.private.make()
    yield folder
    folder.private.clear()
    os.umask(umask)
    shutil.rmtree(top)


def test_another_user_cannot_use_the_key_the_sockets_or_the_weights_of_a_run(run_folder):
    private = run_folder.private
    private.make_key()
    write_private(private.external_key, "theirs")
    (run_folder.path / "metrics.jsonl").write_text("for everybody")

    def connect(path: Path) -> str:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(os.fspath(path))
        return "connected"

    with closing(MemoryFile()) as weights, socket.socket(socket.AF_UNIX) as server:
        weights.write({"w": torch.ones(2)})
        server.bind(os.fspath(private.vllm_socket_of("inference")))
        server.listen()
        assert connect(private.vllm_socket_of("inference")) == "connected"
        weights_path = Path(weights.path)  # of this process
        results = as_another_user(
            {
                "public": (run_folder.path / "metrics.jsonl").read_text,
                "key": private.key.read_text,
                "key of servers": private.external_key.read_text,
                "list": lambda: os.listdir(private.path),
                "list temporary": lambda: os.listdir(private.temporary),
                "write": lambda: (private.path.resolve() / "key").write_text("mine"),
                "connect": lambda: connect(private.vllm_socket_of("inference")),
                "weights": weights_path.read_bytes,
                "environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
            }
        )
    assert results.pop("public") == "for everybody"
    assert set(results.values()) == {DENIED}, results
    private.path.resolve().chmod(0o755)  # the key is closed to others even then
    assert as_another_user({"key": private.key.read_text}) == {"key": DENIED}
