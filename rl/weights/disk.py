"""Through a folder that trainer and vLLM both see: slow, and it asks nothing else of the hosts.

A file is written aside and renamed, so it is never seen in part, bears its fingerprint as a name,
and is deleted when every replica has loaded it.
"""

from contextlib import suppress
from pathlib import Path

from rl.inference.routes import VLLMRoutes
from rl.weights.memory_file import MemoryFile, WrittenWeights
from rl.weights.transport import Weights, WholeWeights, load_whole

_NAMES = "weights-*.safetensors"


class DiskSender(WholeWeights):
    """Writes the weights into a folder, which it makes; vLLM's end is shm.FileReader."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._file, self._written = MemoryFile(), WrittenWeights("", "")

    def pack(self, weights: Weights) -> str:
        """Write the file; return its fingerprint."""
        mark = self._file.write(weights).fingerprint  # which hashes, and lays them end to end
        path = self._folder / _NAMES.replace("*", mark)
        self.release()  # what a trainer left that was killed while vLLM read it
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_bytes(self._file.content)
        aside.replace(path)
        self._written = WrittenWeights(str(path), mark)
        return mark

    def connect(self, vllm: VLLMRoutes) -> None:
        """Nothing to agree on: each push names its file."""
        vllm.init_transfer({"transport": "disk", "facts": {}})

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Have vLLM load the file."""
        load_whole(vllm, version, self._written.fingerprint, {"path": self._written.path})

    def release(self) -> None:
        """Delete what was written: vLLM has copied it."""
        for pattern in (_NAMES, "weights-*.new"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody may have put something else there
            self._folder.rmdir()
