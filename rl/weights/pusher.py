"""New weights for vLLM after every step, and the proof that they arrived.

    shm        pause(keep) -> start -> update -> finish(version) -> resume
    adapter    pause(keep) -> update -> version -> resume      (running requests go on)

What is sent lies in an anonymous file in memory (rl/weights/memory_file.py), which vLLM reads
through our /proc entry. Three things can go wrong unseen, and each is an error here:
the push changed nothing, vLLM loaded something else (our plugin compares fingerprints and what
every layer computes), or trainer and vLLM disagree although the weights are the same (the
probe).
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from rl.config.transport import Transport
from rl.inference.replica import Replica
from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.model.lora import write_adapter
from rl.records import MicroBatch
from rl.run.address import Address
from rl.run.failure import RunFailed
from rl.weights.memory_file import MemoryFile

if TYPE_CHECKING:
    from rl.learner.policy import Policy


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """How weights travel (conf/sync)."""

    transport: Literal["auto", "shm", "adapter"]
    probe_every: int
    probe_rows: int
    max_mismatch: float


# A policy grown sure of itself has tokens so improbable that rounding alone moves them more.
_LATER_SLACK = 2.0


class WeightPusher:
    """Pushes weights and probes the result. Rank 0 talks to vLLM; all ranks call every method."""

    def __init__(
        self,
        sync: WeightSync,
        transport: Transport,
        socket: Path,
        *,
        timeout: float,
        goes_on: bool = False,
    ) -> None:
        """`goes_on`: the run has been probed before it was stopped, so no probe is its first."""
        self._sync, self._transport = sync, transport
        self._served_as = SERVED_AS[transport]
        only = Replica("inference", Address(path=socket))
        self._vllm, self._private = VLLMRoutes(only, timeout=timeout), socket.parent
        self._file, self._last = MemoryFile(), ""
        self._slack = _LATER_SLACK if goes_on else 1.0

    def connect(self, policy: "Policy") -> None:
        """Open the transfer engine inside vLLM, and make it know the name of the adapter.

        vLLM reads an adapter from a folder and could load the next one in place of it, but then
        reads the files again at every step of every request. So that is done once, and pushes
        replace what is loaded.
        """
        adapter = policy.adapter_weights() if self._transport == "adapter" else {}
        if not policy.ranks.first:
            return
        if not adapter:
            self._vllm.init_transfer({})
            return
        with TemporaryDirectory(dir=self._private) as folder:
            write_adapter(policy.engine.module.model, adapter, Path(folder))
            form = json.loads((Path(folder) / "adapter_config.json").read_text())
            self._vllm.load_adapter(SERVED_AS["adapter"], Path(folder))
        self._vllm.init_transfer({"config": form})
        # Never finished: finishing an update makes vLLM drop all adapters.
        self._vllm.start_update()

    def push(self, policy: "Policy", version: int, *, must_differ: bool) -> None:
        """Make vLLM sample with the policy's present weights, as `version`.

        Args:
            policy: whose weights.
            version: what vLLM reports as the version of every token from now on.
            must_differ: the optimizer took a step, so equal weights would be an error.

        """
        alone = self._transport == "adapter"
        weights = policy.adapter_weights() if alone else policy.weights()
        if not policy.ranks.first:
            return
        # A file in memory: over HTTP gigabytes would be serialised, copied and parsed again. vLLM
        # has let go of the last push's when it has answered `finish_update`, so they may be
        # written over.
        written = self._file.write(weights)
        if must_differ and written.fingerprint == self._last:
            raise RunFailed(
                f"the optimizer step before version {version} changed no weight in "
                f"{next(iter(weights.values())).dtype}: raise optim.learning_rate, or use "
                "model.dtype=float32"
            )
        self._last = written.fingerprint
        # Running requests stay: a half-sampled rollout goes on with the new weights, and each
        # of its tokens says which version it is from.
        with self._vllm.together():
            self._vllm.pause()
            if alone:
                self._vllm.update(asdict(written))
                self._vllm.set_version(version)
            else:
                self._vllm.start_update()
                self._vllm.update(asdict(written))
                self._vllm.finish_update(version)
            self._vllm.resume()

    def probe(self, policy: "Policy", batch: MicroBatch, version: int) -> dict[str, float]:
        """Compare vLLM's logprobs with the trainer's on rows of a batch, right after a push.

        Both score given text at temperature 1, so nothing but the weights and the arithmetic
        counts.

        Raises:
            RunFailed: they differ by more than `max_mismatch`, at a later probe by twice as much.

        """
        if self._sync.probe_every == 0 or version % self._sync.probe_every:
            return {}
        # All but the last token: a row may fill vLLM's context, which must have room for one more.
        lengths = _lengths(batch)[: self._sync.probe_rows] - 1
        token_ids = batch.token_ids[: self._sync.probe_rows, : lengths.max()]
        trainer_logprobs = policy.logprobs(token_ids)  # collective: also where nothing is compared
        if not policy.ranks.first:
            return {}
        texts = [row[:n].tolist() for row, n in zip(token_ids, lengths, strict=True)]
        with ThreadPoolExecutor(len(texts)) as pool:  # each waits for vLLM's next step
            scores = list(pool.map(self._score, texts))
        gap = torch.cat(
            [
                (torch.tensor(score) - row[1:n]).abs()
                for score, row, n in zip(scores, trainer_logprobs, lengths, strict=True)
            ]
        )
        if not len(gap):  # no row trained: there is no text to compare
            return {}
        mean = float(gap.mean())
        bound = self._sync.max_mismatch * self._slack
        if mean > bound:
            later = ", doubled after the first probe" if self._slack > 1 else ""
            raise RunFailed(
                f"trainer and vLLM disagree on the weights of version {version}: mean |logprob "
                f"difference| {mean:.4f} > {bound:g} (sync.max_mismatch={self._sync.max_mismatch:g}"
                f"{later}). Every importance ratio would be wrong. Compare model.dtype, "
                "attention and rope settings of both"
            )
        self._slack = _LATER_SLACK
        return {"mismatch/mean_abs": mean, "mismatch/max_abs": float(gap.max())}

    def _score(self, token_ids: list[int]) -> list[float]:
        """Return vLLM's logprob of each token but the first."""
        return self._vllm.score(self._served_as, token_ids) if len(token_ids) > 1 else []


def _lengths(batch: MicroBatch) -> np.ndarray:
    """Tokens of each row up to its last completion token. [B]"""
    width = batch.completion_mask.shape[1]
    from_the_end = batch.completion_mask[:, ::-1].argmax(axis=1)  # [B]
    # 2 where nothing was sampled: less its last one (see `probe`) nothing is left to compare.
    return np.where(batch.completion_mask.any(axis=1), width - from_the_end, 2)
