"""Sockets, keys and temporary files of one run, for us alone and for as long as it lasts."""

import os
from pathlib import Path

from rl.run.whole_files import remove, write_private

_LONGEST_SOCKET = 107  # bytes that the kernel takes
_LONGEST_NAME = len("/tmp/") + 36  # vLLM names its sockets by a UUID
_TEMPORARY = "offbyone-sockets-"


class PrivateFolder:
    """<run>/sockets: a folder, or a link to one whose path is short."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, *, shared: bool = False) -> None:
        """Make it anew.

        Unix socket paths are short; below a deep folder it is a link to a short temporary one. Not
        where it is `shared` with other hosts, for a key instead of sockets.
        """
        import tempfile

        self.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if shared or len(os.fsencode(self._inside)) + _LONGEST_NAME <= _LONGEST_SOCKET:
            self.path.mkdir(mode=0o700)
        else:
            self.path.symlink_to(tempfile.mkdtemp(prefix=_TEMPORARY))
        (self._inside / "tmp").mkdir(mode=0o700)

    def clear(self) -> None:
        """Delete it, and the temporary folder that it links to."""
        import tempfile

        target = self._inside
        remove(self.path)
        # Any other that a link points to is somebody else's.
        if target.parent == Path(tempfile.gettempdir()).resolve() and _TEMPORARY in target.name:
            remove(target)

    @property
    def _inside(self) -> Path:
        return self.path.resolve()  # a path through the link would be as long as without

    @property
    def key(self) -> Path:
        """What every TCP route of the run asks for; there is none where all routes are Unix's."""
        return self._inside / "key"

    def make_key(self) -> None:
        """Make the key of this run."""
        import secrets

        write_private(self.key, secrets.token_urlsafe(32))

    def read_key(self) -> str | None:
        """Return the key of this run, None where no route asks for it."""
        return _read(self.key)

    @property
    def servers_key(self) -> Path:
        """What somebody else's vLLMs ask for, if anything: other hosts have no variable of ours."""
        return self._inside / "servers_key"

    def keep_servers_key(self, key: str) -> None:
        """Tell every part what they ask for."""
        write_private(self.servers_key, key)

    def read_servers_key(self) -> str | None:
        """Return what they ask for, None where they ask for nothing."""
        return _read(self.servers_key)

    @property
    def vllm_socket(self) -> Path:
        """Where the only vLLM listens."""
        return self.vllm_socket_of("inference")

    def vllm_socket_of(self, part: str) -> Path:
        """Where one of several listens: vllm.sock, vllm0.sock, vllm1.sock, ..."""
        return self.socket_of(part.replace("inference", "vllm"))

    def socket_of(self, part: str) -> Path:
        """Where a part listens whose clients share its host."""
        return self._inside / f"{part}.sock"

    @property
    def rollouts_socket(self) -> Path:
        """Where the rollouts process listens."""
        return self.socket_of("rollouts")

    @property
    def rendezvous(self) -> Path:
        """The file through which the trainer's ranks meet."""
        return self._inside / "rendezvous"

    def environment(self) -> dict[str, str]:
        """What the processes of a run see: temporary files, vLLM's sockets too, are ours alone.

        What PyTorch compiles is meant to outlast a run, so it stays where it would be without us.
        Its precompiled headers it would keep among the temporary files: 5 s of every run.
        """
        import getpass
        import tempfile

        compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        return {
            "TMPDIR": str(self._inside / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
