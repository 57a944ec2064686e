"""Our process on a node of Ray: it starts children and a reaper as the supervisor does.

Ray starts one per bundle and ends it with the supervisor. Its children then end by the kernel's
parent-death signal and by the reaper. This module does not import Ray.
"""

import os
import shutil
import tempfile
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from rl.cluster.host import Start
from rl.cluster.local import LocalHost
from rl.runtime.child import Child, Reaper
from rl.runtime.network import free_port, own_address

_SEEN_S = 10.0  # a network file system shows a new file a few seconds late


class RayNode:
    """Starts processes on its node; Ray calls it sequentially, in the main thread."""

    def __init__(self) -> None:
        # Not in the run's folder, because vLLM's own sockets need a local file system.
        self._temporary = Path(tempfile.mkdtemp(prefix="offbyone-"))
        self._children: list[Child] = []
        self._reaper = Reaper()
        self._reaper.__enter__()
        self._host = LocalHost(self._reaper)

    def prepare(self, marker: Path, digest: str, python: str, working_folder: str) -> str:
        """Change to the supervisor's working folder; return what is missing here, "" if nothing is.

        Args:
            marker: a file of the run's folder.
            digest: the hash of what the supervisor wrote into that file.
            python: the supervisor's interpreter.
            working_folder: of the supervisor.

        """
        deadline = time.monotonic() + _SEEN_S
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        if not marker.exists() or sha256(marker.read_bytes()).hexdigest() != digest:
            return (
                f"does not see {marker.parent}: choose an output_dir on a file system that all "
                "nodes share, mounted at the same path"
            )
        if not os.access(python, os.X_OK):
            return f"has no {python}: install .venv at the same path on every node, or share it"
        if not os.path.isdir(working_folder):
            return f"has no {working_folder}: share it, or start from a folder that all nodes have"
        os.chdir(working_folder)  # children inherit it
        return ""

    def address(self, interface: str) -> str:
        """Return the address of the interface with that name."""
        return own_address(interface)

    def devices(self) -> list[str]:
        """Return the GPUs that Ray has reserved here."""
        return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]

    def start(self, start: Start) -> int:
        """Start a process; return its number for later calls."""
        env = {**start.env, "TMPDIR": str(self._temporary)}
        self._children.append(self._host.start(replace(start, env=env)))
        return len(self._children) - 1

    def returncodes(self) -> list[int | None]:
        """Return the exit status of each process, in the order of their starts."""
        self._reaper.ensure_alive()
        return [child.returncode for child in self._children]

    def kill(self, number: int) -> None:
        """End a process with all its children."""
        self._children[number].kill()

    def free_port(self, address: str) -> int:
        """Return a TCP port that was free a moment ago."""
        return free_port(address)

    def end(self) -> None:
        """End all processes within one grace period."""
        self._host.end()
        self._reaper.__exit__()
        shutil.rmtree(self._temporary, ignore_errors=True)
