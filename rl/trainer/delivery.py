"""How a version comes to the vLLMs: pushed, proved, or given up by all ranks together.

    push ---> probe ---> live
      ^         |
      |         v nobody has it
      +---- another vLLM has started meanwhile
            the run is to stop: the step is kept
            neither: the run fails

Rank 0 alone talks to vLLM. What came of it, it tells the others, so that all go the same way and
none of them waits for a batch while the first still waits for a vLLM.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from rl.learner.ranks import Ranks
from rl.records import MicroBatch
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.trainer.replicas import PushedReplicas
from rl.weights.pusher import NoReceiver, WeightPusher

if TYPE_CHECKING:
    from rl.learner.policy import Policy

# After which the supervisor has seen that vLLM is gone, or that it only closed its socket: it looks
# every 5 s, and ends it.
_NOTICED_S = 10.0
_POLL_S = 0.2

Phase = Callable[[str, str], AbstractContextManager[None]]  # a name to count it by, and what it is


class Delivery:
    """All ranks hold one and call the same methods."""

    def __init__(
        self,
        pusher: WeightPusher,
        replicas: PushedReplicas,
        policy: "Policy",
        ranks: Ranks,
        run_folder: RunFolder,
    ) -> None:
        self._pusher, self._replicas = pusher, replicas
        self._policy, self._ranks, self._run_folder = policy, ranks, run_folder

    def begin(self, version: int, startup_timeout: float) -> None:
        """Wait until every vLLM answers, and bring it what the run starts from."""
        # The supervisor watches the servers and ends us if one fails, so this only waits.
        self._replicas.wait(startup_timeout)
        self._join()
        # What vLLM loaded is not it: dummy weights, or on resuming those the run began with.
        self._pusher.push(self._policy, version, must_differ=False)

    def bring(self, version: int, batch: MicroBatch, stats: dict[str, float], phase: Phase) -> bool:
        """Have every vLLM sample with this version; False if none has it and the run is to stop.

        Args:
            version: the policy's present weights.
            batch: the first micro-batch of what it was trained on.
            stats: of its step; those of the probe are added.
            phase: counts time and says what is being done.

        Raises:
            RunFailed: no vLLM has it and nobody wants the run to stop; or the weights are wrong.

        """

        def push() -> None:
            with phase("push", f"pushing version {version}"):
                self._join()
                self._pusher.push(self._policy, version, must_differ=moved)

        def probe() -> None:
            with phase("probe", f"comparing version {version} with vLLM's"):
                stats.update(self._pusher.probe(self._policy, batch, version))

        # False for NaN, of a step that was skipped: equal weights are right then.
        moved = stats["train/grad_norm"] > 0 and stats["train/learning_rate"] > 0
        while lost := self._reached_nobody(push) or self._reached_nobody(probe):
            match self._ranks.told(self._what_follows() if self._ranks.first else "fail"):
                case "stop":
                    return False
                case "fail":
                    raise RunFailed(lost)
            moved = False  # the same weights once more
        return True

    def living(self) -> dict[str, int]:
        """Return who has the weights, each with its incarnation; the others are started again."""
        for lost in self._pusher.lost():
            self._replicas.lose(lost.name, lost.reason)
        return self._replicas.living

    def _reached_nobody(self, give: Callable[[], None]) -> str:
        """Do it; return why no vLLM is left, "" if one is. Collective."""
        lost = ""
        try:
            give()
        except NoReceiver as error:
            lost = str(error)
        return self._ranks.told(lost)

    def _what_follows(self) -> Literal["again", "stop", "fail"]:
        """Let the supervisor see what is lost, too: it starts vLLM again or ends the run."""
        self.living()
        deadline = time.monotonic() + _NOTICED_S
        while time.monotonic() < deadline:
            if self._run_folder.stop_request.exists():
                return "stop"
            if self._join():
                return "again"
            time.sleep(_POLL_S)
        return "fail"

    def _join(self) -> bool:
        """Reach those that have started since; return whether there are any."""
        newcomers = self._replicas.newcomers() if self._ranks.first else []
        self._pusher.join(newcomers)
        return bool(newcomers)
