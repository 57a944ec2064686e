"""Push each policy version to all vLLM replicas, and decide what happens if none can load it.

    push ---> probe ---> vLLM samples with the version
     ^ |        |
     | v        v
     | no vLLM has the version ---> request restarts and wait
     |                                  |
     '--------- a vLLM has started <----+----> a stop is requested: end the run after this step
                                        '----> nothing happens in time: the run fails

Only rank 0 communicates with vLLM. It sends the outcome to the other ranks, so that all ranks take
the same branch and no rank waits for a batch while rank 0 still waits for a vLLM.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Literal

from rl.config.nodes import InferenceNode
from rl.inference.replica import Replica, started_replicas
from rl.inference.routes import VLLMRoutes, is_healthy, wait_until_healthy
from rl.learner.policy import Policy
from rl.learner.ranks import Ranks
from rl.records import MicroBatch
from rl.runtime.endpoint import request_restart
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.weights.pusher import NoReceiver, WeightPusher

_POLL_S = 0.2

Phase = Callable[[str, str], AbstractContextManager[None]]
"""(name of the time metric, text on the screen) -> context manager that measures the time"""


class Receivers:
    """The vLLM replicas that receive weights. `updated`: those without a failed push or probe."""

    def __init__(self, run_folder: RunFolder, inference: InferenceNode, *, timeout: float) -> None:
        self._run_folder, self._inference, self._timeout = run_folder, inference, timeout
        # Rank 0 must stop waiting for a restart before the other ranks time out (2 * `timeout`).
        self.restart_timeout = min(inference.startup_timeout, timeout)
        self._known: dict[str, Replica] = {}  # replicas that `new_replicas` has returned
        self.updated: dict[str, int] = {}  # replica name -> incarnation, the number of its restarts

    def wait(self) -> None:
        """Wait until all replicas answer. Raise RunFailed after inference.startup_timeout."""
        timeout, began = self._inference.startup_timeout, time.monotonic()
        while len(started := self._started_replicas()) < len(self._inference.names):
            if time.monotonic() > began + timeout:
                limit = f"inference.startup_timeout={timeout:g} s"
                raise RunFailed(
                    f"not every vLLM has started within {limit}: see logs/inference*.log, and "
                    "raise the limit if they start slowly"
                )
            time.sleep(_POLL_S)
        for replica in started:
            wait_until_healthy(replica, timeout, began=began)

    def new_replicas(self) -> list[VLLMRoutes]:
        """Return healthy replicas that this method has not returned since their last start."""
        started = self._started_replicas()
        fresh = [r for r in started if self._known.get(r.name) != r and is_healthy(r)]
        self._known |= {replica.name: replica for replica in fresh}
        self.updated |= {replica.name: replica.incarnation for replica in fresh}
        return [VLLMRoutes(replica, timeout=self._timeout) for replica in fresh]

    def _started_replicas(self) -> list[Replica]:
        return started_replicas(self._run_folder, self._inference)


@dataclass(frozen=True)
class Delivery:
    _pusher: WeightPusher
    _receivers: Receivers
    _policy: Policy
    _ranks: Ranks
    _run_folder: RunFolder

    def begin(self, version: int) -> None:
        """Wait until every vLLM answers, and push the weights with which this process starts."""
        self._receivers.wait()
        self._include_new_replicas()
        self._pusher.push(self._policy, version, must_differ=False)

    def deliver(
        self, version: int, batch: MicroBatch, stats: dict[str, float], phase: Phase
    ) -> bool:
        """Push this version to every vLLM, and compare logprobs with one of them (the probe).

        Add the probe's metrics to `stats`. If no vLLM has the version, wait until one has restarted
        and push again. Return False if a stop is requested while this method waits. Raise RunFailed
        if no vLLM restarts in time.
        """

        def push() -> None:
            with phase("push", f"pushing version {version}"):
                self._include_new_replicas()
                self._pusher.push(self._policy, version, must_differ=has_changed)

        def probe() -> None:
            with phase("probe", f"comparing logprobs of version {version} with vLLM"):
                stats.update(self._pusher.probe(self._policy, batch, version))

        # A skipped step changes no weight. Its gradient norm is NaN, and NaN > 0 is False.
        has_changed = stats["train/grad_norm"] > 0 and stats["train/learning_rate"] > 0
        while failure := self._catch_failure(push) or self._catch_failure(probe):
            match self._ranks.from_first(self._next_action() if self._ranks.first else "fail"):
                case "stop":
                    return False
                case "fail":
                    raise RunFailed(failure)
            has_changed = False  # the next push sends the same weights again
        return True

    def push_again(self) -> dict[str, int]:
        """Push to restarted vLLMs. Return `updated_replicas()`, or {} if no vLLM has restarted."""
        if not self._include_new_replicas():
            return {}
        with suppress(NoReceiver):  # `updated_replicas` then requests another restart
            self._pusher.push_again()
        return self.updated_replicas()

    def updated_replicas(self) -> dict[str, int]:
        """Request restarts of replicas that failed a push or probe. Return the working replicas."""
        for name, reason in self._pusher.take_lost().items():
            request_restart(self._run_folder, name, self._receivers.updated.pop(name), reason)
        return self._receivers.updated

    def _catch_failure(self, work: Callable[[], None]) -> str:
        """Call `work`. Return the text of rank 0's NoReceiver, or "" without error. Collective."""
        failure = ""
        try:
            work()
        except NoReceiver as error:
            failure = str(error)
        return self._ranks.from_first(failure)

    def _next_action(self) -> Literal["again", "stop", "fail"]:
        """Request restarts, then wait for a restarted vLLM or for the supervisor's stop request."""
        self.updated_replicas()
        deadline = time.monotonic() + self._receivers.restart_timeout
        while time.monotonic() < deadline:
            if self._run_folder.stop_request.exists():
                return "stop"
            if self._include_new_replicas():
                return "again"
            time.sleep(_POLL_S)
        return "fail"

    def _include_new_replicas(self) -> bool:
        """On rank 0, include newly started replicas in the next push. Return whether any exist."""
        new_replicas = self._receivers.new_replicas() if self._ranks.first else []
        self._pusher.add(new_replicas)
        return bool(new_replicas)
