"""The vLLMs that get the weights, seen by rank 0: who has started, who joins, who is lost."""

from collections.abc import Mapping
from typing import Any

from rl.inference.replica import Replica, names_of, started_replicas
from rl.inference.routes import healthy, wait_until_healthy
from rl.run.endpoint import request_restart
from rl.run.folder import RunFolder


class PushedReplicas:
    """Whoever has the newest version is `living`; whoever starts later joins with the next push."""

    def __init__(self, run_folder: RunFolder, inference: Mapping[str, Any]) -> None:
        self._run_folder, self._inference = run_folder, inference
        self._known: dict[str, Replica] = {}  # started, and given the weights or lost since
        self.living: dict[str, int] = {}  # incarnations, by name

    def wait(self, timeout: float) -> list[Replica]:
        """Wait until all of them answer, `timeout` seconds for each; return them."""
        # The supervisor starts them before us, watches them, and ends us if one of them fails.
        started = started_replicas(self._run_folder, self._inference)
        for replica in started:
            wait_until_healthy(replica, timeout)
        self._join(started)
        return started

    def newcomers(self) -> list[Replica]:
        """Return those that were started again and answer by now; they have no weights yet."""
        if len(names_of(self._inference)) == 1:
            return []
        started = started_replicas(self._run_folder, self._inference)
        fresh = [one for one in started if self._known.get(one.name) != one and healthy(one)]
        self._join(fresh)
        return fresh

    def _join(self, replicas: list[Replica]) -> None:
        self._known |= {replica.name: replica for replica in replicas}
        self.living |= {replica.name: replica.incarnation for replica in replicas}

    def lose(self, name: str, why: str) -> None:
        """This one did not take the weights: nobody asks it any more, and it is started again."""
        incarnation = self.living.pop(name)
        request_restart(self._run_folder, name, incarnation, why)
