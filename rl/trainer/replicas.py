"""The vLLMs that get the weights, as a rank sees them: who has started, who joins, who is lost."""

import time
from collections.abc import Mapping
from typing import Any

from rl.inference.replica import Replica, names_of, started_replicas
from rl.inference.routes import VLLMRoutes, healthy, wait_until_healthy
from rl.run.endpoint import request_restart
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder

_POLL_S = 0.2


class PushedReplicas:
    """Whoever has the newest version is `living`; whoever starts later joins with the next push."""

    def __init__(
        self, run_folder: RunFolder, inference: Mapping[str, Any], *, timeout: float
    ) -> None:
        """`timeout`: seconds of trainer.wait_timeout."""
        self._run_folder, self._inference, self._timeout = run_folder, inference, timeout
        self._known: dict[str, Replica] = {}  # pushed to, at least once
        self.living: dict[str, int] = {}  # incarnations, by name

    def wait(self, timeout: float) -> None:
        """Wait until all of them answer, at most `timeout` seconds."""
        # The supervisor starts them, watches them, and ends us if one of them fails.
        deadline = time.monotonic() + timeout
        while len(started := self._started()) < len(names_of(self._inference)):
            if time.monotonic() > deadline:
                raise RunFailed(f"not every vLLM was started within {timeout:g} s")
            time.sleep(_POLL_S)
        for replica in started:
            wait_until_healthy(replica, max(deadline - time.monotonic(), 0.0))

    def newcomers(self) -> list[VLLMRoutes]:
        """Return those that answer and were not pushed to since they were started (again)."""
        fresh = [one for one in self._started() if self._known.get(one.name) != one]
        fresh = [one for one in fresh if healthy(one)]
        self._known |= {replica.name: replica for replica in fresh}
        self.living |= {replica.name: replica.incarnation for replica in fresh}
        return [VLLMRoutes(replica, timeout=self._timeout) for replica in fresh]

    def lose(self, name: str, why: str) -> None:
        """This one did not take the weights: nobody asks it any more, and it is started again."""
        request_restart(self._run_folder, name, self.living.pop(name), why)

    def _started(self) -> list[Replica]:
        return started_replicas(self._run_folder, self._inference)
