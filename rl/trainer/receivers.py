"""The vLLMs that get the weights, as rank 0 sees them: which have started, joined, were lost."""

import time

from rl.config.nodes import InferenceNode
from rl.inference.replica import Replica, started_replicas
from rl.inference.routes import VLLMRoutes, healthy, wait_until_healthy
from rl.runtime.endpoint import request_restart
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder

_POLL_S = 0.2


class Receivers:
    """Finds new and restarted replicas; `living` holds those with the newest version."""

    def __init__(self, run_folder: RunFolder, inference: InferenceNode, *, timeout: float) -> None:
        """`timeout`: seconds of trainer.wait_timeout."""
        self._run_folder, self._inference, self._timeout = run_folder, inference, timeout
        self._known: dict[str, Replica] = {}  # pushed to, at least once
        self.living: dict[str, int] = {}  # name -> number of its start

    def wait(self) -> None:
        """Wait until all replicas answer, at most inference.startup_timeout seconds.

        The supervisor starts and watches them, and ends this process if one of them fails.
        """
        timeout = self._inference.startup_timeout
        deadline = time.monotonic() + timeout
        while len(started := self._started()) < len(self._inference.names):
            if time.monotonic() > deadline:
                raise RunFailed(f"not every vLLM was started within {timeout:g} s")
            time.sleep(_POLL_S)
        for replica in started:
            wait_until_healthy(replica, max(deadline - time.monotonic(), 0.0))

    def newcomers(self) -> list[VLLMRoutes]:
        """Return the replicas that answer and got no push since their last start."""
        fresh = [one for one in self._started() if self._known.get(one.name) != one]
        fresh = [one for one in fresh if healthy(one)]
        self._known |= {replica.name: replica for replica in fresh}
        self.living |= {replica.name: replica.incarnation for replica in fresh}
        return [VLLMRoutes(replica, timeout=self._timeout) for replica in fresh]

    def lose(self, name: str, why: str) -> None:
        """Ask the supervisor to restart a replica that did not take the weights."""
        request_restart(self._run_folder, name, self.living.pop(name), why)

    def _started(self) -> list[Replica]:
        return started_replicas(self._run_folder, self._inference)
