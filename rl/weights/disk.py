"""All weights through a folder that trainer and vLLM both see: slow, needs nothing else.

A file is written under another name and renamed, so vLLM never sees half of it. Its name contains
its fingerprint. It is deleted when every replica has loaded it.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.inference.routes import VLLMRoutes
from rl.weights.shm import FileReader
from rl.weights.transport import Reader, Sender, Weights

_NAMES = ("weights-*.safetensors", "weights-*.new")


@dataclass(kw_only=True)
class DiskSender(Sender):
    """conf/sync/disk.yaml."""

    reader: ClassVar[type[Reader]] = FileReader
    shares_folder: ClassVar[bool] = True
    sender_copy: ClassVar[bool] = False

    def pack(self, weights: Weights) -> str:
        """Write the file; return the fingerprint of the weights."""
        fingerprint = super().pack(weights)
        self.release()  # a trainer that was killed during a push has left its file
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / _NAMES[0].replace("*", fingerprint)
        incomplete = path.with_suffix(".new")
        incomplete.write_bytes(self._file.content)
        incomplete.replace(path)
        self._path = path
        return fingerprint

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:  # noqa: ARG002 the same for every vLLM
        """Return the path of the file."""
        return {"path": str(self._path)}

    def release(self) -> None:
        """Delete the file: every vLLM has copied it."""
        for pattern in _NAMES:
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the user's folder may hold other files
            self._folder.rmdir()
