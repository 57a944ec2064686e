"""Push the weights to every vLLM at the start and after each step, and verify their arrival.

    all weights     pause(keep) -> start -> update -> finish(version) -> resume
    adapter         pause(keep) -> update -> version -> resume

Running requests continue after the pause. Every replica has a separate thread, so no replica waits
for another. A push raises an error if the optimizer step changed no weight, or if vLLM has other
weights. (Our plugin compares fingerprints, and parameters if no tensor parallelism splits them.)
The probe raises an error if trainer and vLLM compute different logprobs with the same weights.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.learner.policy import Policy
from rl.records import MicroBatch
from rl.runtime.failure import RunFailed
from rl.weights.probe import MismatchBound, ProbedRows
from rl.weights.transport import Sender


class NoReceiver(RunFailed):
    """The error raised if no vLLM has loaded the pushed weights."""


class WeightPusher:
    """Pushes and probes weights. All ranks call `push` and `probe`. Only rank 0 contacts vLLM."""

    def __init__(self, sender: Sender, *, resumed: bool = False) -> None:
        self._sender = sender
        self._receivers: dict[str, VLLMRoutes] = {}
        self._connected, self._lost = set[str](), dict[str, str]()
        self._last, self._bound = "", MismatchBound(sender.max_mismatch, resumed=resumed)

    def add(self, receivers: Sequence[VLLMRoutes]) -> None:
        for receiver in receivers:
            self._receivers[receiver.replica.name] = receiver
            self._connected.discard(receiver.replica.name)

    def take_lost(self) -> dict[str, str]:
        """Return {name: reason} of replicas that failed a push or a probe since the last call."""
        lost, self._lost = self._lost, {}
        return lost

    def push(self, policy: Policy, version: int, *, must_differ: bool) -> None:
        """Make every vLLM sample with the policy's current weights, as `version`.

        Raise NoReceiver if no vLLM loads them. Raise RunFailed if `must_differ` and no weight has
        changed since the last push.
        """
        # Gather all weights first, so that vLLM is never paused while ranks synchronise.
        weights = self._sender.collect(policy)
        if not policy.ranks.first:
            return
        fingerprint = self._sender.pack(weights)
        if must_differ and fingerprint == self._last:
            raise RunFailed(
                f"all weights of version {version} equal the previous ones after rounding to "
                f"{next(iter(weights.values())).dtype}: raise optim.learning_rate, or use "
                "model.dtype=float32"
            )
        self._last, self._version = fingerprint, version
        receivers = list(self._receivers.values())
        if not receivers:
            raise NoReceiver("no vLLM answers its health check: see logs/inference*.log")
        self._push_to_all(receivers, version)

    def push_again(self) -> None:
        new = [one for name, one in self._receivers.items() if name not in self._connected]
        self._push_to_all(new, self._version)

    def _push_to_all(self, receivers: Sequence[VLLMRoutes], version: int) -> None:
        with ThreadPoolExecutor(len(receivers)) as pool:
            failures = list(pool.map(lambda one: self._push_to(one, version), receivers))
        for receiver, failure in zip(receivers, failures, strict=True):
            if failure:
                self._remove(receiver, failure)

    def _push_to(self, receiver: VLLMRoutes, version: int) -> RunFailed | None:
        try:
            with receiver.shared_timeout():
                if receiver.replica.name not in self._connected:
                    self._sender.connect(receiver)
                    self._connected.add(receiver.replica.name)
                receiver.pause()
                self._sender.send(receiver, version)
                receiver.resume()
        except RunFailed as error:
            return error
        return None

    def _remove(self, receiver: VLLMRoutes, failure: RunFailed) -> None:
        name = receiver.replica.name
        del self._receivers[name]
        self._lost[name] = str(failure)
        if not self._receivers:
            several = len({*self._connected, *self._lost}) > 1
            which = f"no replica is left: {name}: " if several else ""
            raise NoReceiver(f"{which}{failure}") from failure

    def probe(self, policy: Policy, batch: MicroBatch, version: int) -> dict[str, float]:
        """Compare vLLM's logprobs with the trainer's on rows of a batch, right after a push.

        vLLM and trainer score the same text at temperature 1, so only weights and arithmetic can
        differ. All replicas have received equal weights, so it is enough to probe one replica.
        """
        every = self._sender.probe_every
        if every == 0 or version % every:
            return {}
        rows = ProbedRows.of(policy, batch, self._sender.probe_rows)
        while policy.ranks.first:
            receivers = list(self._receivers.values())
            probed = receivers[version // every % len(receivers)]
            try:
                gap = rows.measure_gap(probed, SERVED_AS[self._sender.adapter_only])
            except RunFailed as error:
                self._remove(probed, error)
            else:
                return self._bound.check(gap, version) if len(gap) else {}
        return {}
