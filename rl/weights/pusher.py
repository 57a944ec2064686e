"""New weights for every vLLM after every step, and the proof that they arrived.

    whole weights   pause(keep) -> start -> update -> finish(version) -> resume
    adapter         pause(keep) -> update -> version -> resume     (running requests go on)

Every replica gets them in a thread of its own, and none waits for another. Three things can go
wrong unseen, and each is an error here: the push changed nothing, vLLM loaded something else (our
plugin compares fingerprints and what every layer computes), or trainer and vLLM disagree although
the weights are the same (the probe).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl.config.transport import SyncChoice, Transport
from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.records import MicroBatch
from rl.run.failure import RunFailed
from rl.weights.adapter import AdapterSender
from rl.weights.disk import DiskSender
from rl.weights.gloo import GlooSender
from rl.weights.probe import MismatchBound, ProbedRows
from rl.weights.shm import ShmSender
from rl.weights.transport import Sender

if TYPE_CHECKING:
    from rl.learner.policy import Policy


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """How weights travel (conf/sync)."""

    transport: SyncChoice
    folder: str | None
    probe_every: int
    probe_rows: int
    max_mismatch: float


@dataclass(frozen=True)
class LostReceiver:
    """A replica that did not take the weights: it must answer nothing more before it is restarted.

    It may be paused, and what it holds is not known.
    """

    name: str
    reason: str


class NoReceiver(RunFailed):
    """No vLLM has the weights."""


class WeightPusher:
    """Pushes weights and probes the result. Rank 0 talks to vLLM; all ranks call both."""

    def __init__(
        self,
        sync: WeightSync,
        transport: Transport,
        receivers: Sequence[VLLMRoutes],
        *,
        folder: Path,
        timeout: float,
        goes_on: bool = False,
    ) -> None:
        """Nothing is asked of vLLM yet.

        Args:
            sync: the knobs.
            transport: the way that was chosen for all parts.
            receivers: every vLLM; on rank 0, elsewhere it makes no difference.
            folder: where files for vLLM may lie; for sync=disk.
            timeout: seconds of trainer.wait_timeout.
            goes_on: the run has been probed before it was stopped.

        """
        self._sync, self._served_as = sync, SERVED_AS[transport]
        self._sender = _sender(transport, folder, timeout)
        self._receivers: dict[str, VLLMRoutes] = {}
        self._connected, self._lost = set[str](), list[LostReceiver]()
        self._has_others = False
        self._last, self._bound = "", MismatchBound(sync.max_mismatch, goes_on=goes_on)
        self.join(receivers)

    def join(self, receivers: Sequence[VLLMRoutes]) -> None:
        """Have the next push reach these, too: they are new, or have been started again."""
        for receiver in receivers:
            self._receivers[receiver.replica.name] = receiver
            self._connected.discard(receiver.replica.name)
        self._has_others |= len(self._receivers) > 1

    def lost(self) -> list[LostReceiver]:
        """Return those that pushes and probes go without since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def push(self, policy: "Policy", version: int, *, must_differ: bool) -> None:
        """Make every vLLM sample with the policy's present weights, as `version`.

        Args:
            policy: whose weights.
            version: what vLLM reports as the version of every token from now on.
            must_differ: the optimizer took a step, so equal weights would be an error.

        Raises:
            NoReceiver: no vLLM has taken them.
            RunFailed: the weights did not change.

        """
        # All of it before anything is sent: a rank that waits for another must not keep vLLM.
        weights = self._sender.collect(policy)
        if not policy.ranks.first:
            return
        mark = self._sender.pack(weights)
        if must_differ and mark == self._last:
            raise RunFailed(
                f"the optimizer step before version {version} changed no weight in "
                f"{next(iter(weights.values())).dtype}: raise optim.learning_rate, or use "
                "model.dtype=float32"
            )
        self._last = mark
        receivers = list(self._receivers.values())
        if not receivers:
            raise NoReceiver("no vLLM answers that it is healthy, so none can take the weights")
        with ThreadPoolExecutor(len(receivers)) as pool:
            failures = list(pool.map(lambda one: self._give(one, version), receivers))
        self._sender.release()
        for receiver, failure in zip(receivers, failures, strict=True):
            if failure:
                self._lose(receiver, failure)

    def _give(self, receiver: VLLMRoutes, version: int) -> RunFailed | None:
        """Push to one of them; return what went wrong."""
        try:
            with receiver.together():
                if receiver.replica.name not in self._connected:
                    self._sender.connect(receiver)
                    self._connected.add(receiver.replica.name)
                # Running requests stay: a half-sampled rollout goes on with the new weights, and
                # each of its tokens says which version it is from.
                receiver.pause()
                self._sender.send(receiver, version)
                receiver.resume()
        except RunFailed as error:
            return error
        return None

    def _lose(self, receiver: VLLMRoutes, failure: RunFailed) -> None:
        """Go on without it.

        Raises:
            NoReceiver: there is no other.

        """
        del self._receivers[receiver.replica.name]
        self._lost.append(LostReceiver(receiver.replica.name, str(failure)))
        if not self._receivers:
            which = f"no replica is left: {receiver.replica.name}: " if self._has_others else ""
            raise NoReceiver(f"{which}{failure}") from failure

    def probe(self, policy: "Policy", batch: MicroBatch, version: int) -> dict[str, float]:
        """Compare vLLM's logprobs with the trainer's on rows of a batch, right after a push.

        Both score given text at temperature 1, so nothing but the weights and the arithmetic
        counts. Replicas take turns: each has proved that it computes with these weights.

        Raises:
            NoReceiver: no vLLM answers any more.
            RunFailed: they differ by more than `max_mismatch`, at a later probe by twice as much.

        """
        if self._sync.probe_every == 0 or version % self._sync.probe_every:
            return {}
        rows = ProbedRows.of(policy, batch, self._sync.probe_rows)
        while policy.ranks.first:
            receivers = list(self._receivers.values())
            probed = receivers[version // self._sync.probe_every % len(receivers)]
            try:
                gap = rows.gap(probed, self._served_as)
            except RunFailed as error:
                self._lose(probed, error)
            else:
                return self._bound.metrics(gap, version) if len(gap) else {}
        return {}


def _sender(transport: Transport, folder: Path, timeout: float) -> Sender:
    match transport:
        case "adapter":
            return AdapterSender()
        case "disk":
            return DiskSender(folder)
        case "gloo":
            return GlooSender(timeout)
        case "shm":
            return ShmSender()
