"""RayNode, an actor that Ray runs on a node to start the run's processes there.

Ray starts one RayNode per bundle (bundles.py) and ends it when the supervisor ends. The kernel's
parent-death signal and the reaper then end the RayNode's children. This module does not import Ray.
"""

import os
import shutil
import tempfile
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from rl.cluster.local import LocalHost
from rl.runtime.child import Reaper, Start
from rl.runtime.network import free_port, own_address

_NEW_FILE_TIMEOUT_S = 10.0  # maximum wait until a network file system shows a new file


class RayNode:
    def __init__(self) -> None:
        # Children get this TMPDIR, because vLLM's Unix sockets need a local file system.
        self._temporary = Path(tempfile.mkdtemp(prefix="offbyone-"))
        self._reaper = Reaper()
        self._reaper.__enter__()
        self._host = LocalHost(self._reaper)

    def prepare(self, key_file: Path, digest: str, python: str, working_folder: str) -> str:
        """Check this node and change to the supervisor's working folder. Return a problem or ""."""
        deadline = time.monotonic() + _NEW_FILE_TIMEOUT_S
        while not key_file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        if not key_file.exists() or sha256(key_file.read_bytes()).hexdigest() != digest:
            return (
                f"does not see {key_file.parent}: set output_dir to a folder on a file system that "
                "all nodes mount at the same path"
            )
        if not os.access(python, os.X_OK):
            return f"has no {python}: install .venv at the same path on every node"
        if not os.path.isdir(working_folder):
            return f"has no {working_folder}: start train.py in a folder that all nodes have"
        os.chdir(working_folder)  # children inherit the working folder
        return ""

    def address(self, interface: str) -> str:
        return own_address(interface)

    def devices(self) -> list[str]:
        """Return the GPUs that Ray has reserved for this actor."""
        return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]

    def start(self, start: Start) -> int:
        self._host.start(replace(start, env={**start.env, "TMPDIR": str(self._temporary)}))
        return len(self._host.children) - 1

    def returncodes(self) -> list[int | None]:
        self._reaper.ensure_alive()
        return [child.returncode for child in self._host.children]

    def kill(self, index: int) -> None:
        self._host.children[index].kill()

    def free_port(self, address: str) -> int:
        return free_port(address)

    def end(self) -> None:
        self._host.end()
        self._reaper.__exit__()
        shutil.rmtree(self._temporary, ignore_errors=True)
