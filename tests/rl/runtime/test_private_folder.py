"""Another user of the machine cannot reach what a run keeps for itself."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rl.runtime.files import write_private
from rl.runtime.folder import RunFolder
from rl.weights.memory_file import MemoryFile
from tests.support.another_user import as_another_user

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
DENIED = "Permission denied"


@pytest.fixture(params=["run", "run" * 40], ids=["short", "too long for a socket"])
def run_folder(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunFolder]:
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
        server.bind(os.fspath(private.vllm_socket))
        server.listen()
        assert connect(private.vllm_socket) == "connected"
        weights_path = Path(weights.path)  # of this process
        results = as_another_user(
            {
                "public": (run_folder.path / "metrics.jsonl").read_text,
                "key": private.key.read_text,
                "key of servers": private.external_key.read_text,
                "list": lambda: os.listdir(private.path),
                "list temporary": lambda: os.listdir(private.temporary),
                "write": lambda: (private.path.resolve() / "key").write_text("mine"),
                "connect": lambda: connect(private.vllm_socket),
                "weights": weights_path.read_bytes,
                "environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
            }
        )
    assert results.pop("public") == "for everybody"
    assert set(results.values()) == {DENIED}, results


def test_a_key_is_closed_to_others_even_outside_its_folder(run_folder):
    run_folder.private.make_key()
    run_folder.private.path.resolve().chmod(0o755)
    assert as_another_user({"key": run_folder.private.key.read_text})["key"] == DENIED
