"""Sockets, keys and temporary files of one run, which only the user can read."""

import os
from pathlib import Path

from rl.runtime.files import Inside, remove, write_private

_LONGEST_SOCKET = 107  # bytes that the kernel accepts
_LONGEST_NAME = len("/tmp/") + 36  # vLLM names its sockets by a UUID
_TEMPORARY = "offbyone-sockets-"


class InsideTarget(Inside):
    """A file behind a link. A Unix socket needs the short path, without the link."""

    def __get__(self, owner: "PrivateFolder", _: type) -> Path:
        return owner.path.resolve() / self.name


class PrivateFolder:
    """<run>/sockets: a folder, or a link to a folder with a short path."""

    key = InsideTarget("key")  # that every TCP route requires; missing if all routes are sockets
    servers_key = InsideTarget("servers_key")  # of vLLM servers that the user started
    rendezvous = InsideTarget("rendezvous")  # through which the trainer's ranks find each other
    vllm_socket = InsideTarget("vllm.sock")  # of a single vLLM server
    rollouts_socket = InsideTarget("rollouts.sock")
    temporary = InsideTarget("tmp")

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, *, shared: bool = False) -> None:
        """Create the folder, empty.

        The path of a Unix socket is limited, so in a deep run folder this is a link to a temporary
        folder. A folder that is `shared` with other hosts contains a key and no sockets.
        """
        import tempfile

        self.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if shared or len(os.fsencode(self.path.resolve())) + _LONGEST_NAME <= _LONGEST_SOCKET:
            self.path.mkdir(mode=0o700)
        else:
            self.path.symlink_to(tempfile.mkdtemp(prefix=_TEMPORARY))
        self.temporary.mkdir(mode=0o700)

    def clear(self) -> None:
        """Delete the folder, and the temporary folder that it links to."""
        import tempfile

        target = self.path.resolve()
        remove(self.path)
        # A link may point elsewhere; only our own temporary folder is deleted.
        if target.parent == Path(tempfile.gettempdir()).resolve() and _TEMPORARY in target.name:
            remove(target)

    def vllm_socket_of(self, process: str) -> Path:
        """Return the socket of one of several servers: vllm.sock, vllm0.sock, vllm1.sock, ..."""
        return self.path.resolve() / f"{process.replace('inference', 'vllm')}.sock"

    def make_key(self) -> None:
        """Create a random key for this run."""
        import secrets

        write_private(self.key, secrets.token_urlsafe(32))

    def read_key(self) -> str | None:
        """Return the key of this run, None if it has none."""
        return _read(self.key)

    def keep_servers_key(self, key: str) -> None:
        """Store the key of the user's vLLM servers for every process."""
        write_private(self.servers_key, key)

    def read_servers_key(self) -> str | None:
        """Return the key of the user's vLLM servers, None if they require none."""
        return _read(self.servers_key)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that keep temporary files in this folder.

        The cache of compiled PyTorch code outlives a run, so it keeps its usual place. Precompiled
        headers are turned off, because they would be rebuilt in each run, which takes 5 s.
        """
        import getpass
        import tempfile

        compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        return {
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
