"""The private folder of a run: sockets, keys and temporary files that only the user can read."""

import os
from hashlib import sha256
from pathlib import Path

from envs.loading import cache_folder
from rl.runtime.files import Inside, make_private_folder, remove, write_private

_MAX_SOCKET = 107  # maximum length of a Unix socket's path in bytes, set by the kernel
_MAX_NAME = len("/tmp/") + 36  # bytes of the longest name of a socket: vLLM's tmp/<UUID>


class PrivateFolder:
    """The folder <run>/sockets. It links to a temporary folder if sockets need a shorter path."""

    key = Inside("key")  # key of vLLM and the rollouts process on TCP; missing without TCP
    external_key = Inside("external_key")  # key of vLLM servers that the user started
    rendezvous = Inside("rendezvous")  # the trainer's ranks connect through this file
    rollouts_socket = Inside("rollouts.sock")
    temporary = Inside("tmp")

    def __init__(self, link: Path) -> None:
        self._link = link  # a link only if sockets need a shorter path

    @property
    def path(self) -> Path:
        """The folder, without the link, through which the paths of sockets may be too long."""
        return self._link.resolve()

    def make(self, *, shared: bool = False) -> None:
        """Create the private folder. Delete the content that an earlier start left.

        If other hosts use the folder (`shared`), it contains no sockets and is never a link.
        """
        import tempfile

        self.clear()
        self._link.parent.mkdir(parents=True, exist_ok=True)
        if shared or len(os.fsencode(self.path)) + _MAX_NAME <= _MAX_SOCKET:
            self._link.mkdir(mode=0o700)
        else:
            self._link.symlink_to(tempfile.mkdtemp(prefix=self._prefix()))
        self.temporary.mkdir(mode=0o700)

    def clear(self) -> None:
        """Delete the folder. If the folder is a link, delete the link and the temporary folder."""
        import tempfile

        target = self.path
        remove(self._link)
        # Delete only this run's target, because a copied run folder links to the original's target.
        is_temporary = target.parent == Path(tempfile.gettempdir()).resolve()
        if is_temporary and target.name.startswith(self._prefix()):
            remove(target)

    def _prefix(self) -> str:
        path = os.fsencode(self._link.parent.resolve() / self._link.name)
        return f"offbyone-sockets-{sha256(path).hexdigest()[:8]}-"

    def vllm_socket_of(self, process: str) -> Path:
        """Return the socket of a server, such as vllm.sock for the process `inference`."""
        return self.path / f"{process.replace('inference', 'vllm')}.sock"

    def make_key(self) -> None:
        """Create a random key, which vLLM and the rollouts process require on TCP ports."""
        import secrets

        write_private(self.key, secrets.token_urlsafe(32))

    def read_key(self, *, is_external: bool = False) -> str | None:
        """Return the key of this run's servers or of external servers, or None if there is none."""
        path = self.external_key if is_external else self.key
        return path.read_text() if path.exists() else None

    def environment(self) -> dict[str, str]:
        """Return the environment variables that place temporary files in this folder.

        They place PyTorch's compiled code in the user's cache, because later runs reuse the code.
        PyTorch's default is /tmp, where another user could write code that this run then executes.
        Precompiled headers are disabled, because each run would build them again, which takes 5 s.
        """
        try:
            compiled = make_private_folder(cache_folder() / "compiled")
        except OSError:  # the cache cannot be written, or it belongs to another user
            compiled = self.temporary / "compiled"
        return {
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }
