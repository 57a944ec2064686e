"""More cases of policy_worker.py: a version that no vLLM takes. Each is run by every rank."""

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

SLOW_S = 1.0  # of the first rank, which alone talks to vLLM
STATS = {"train/grad_norm": 1.0, "train/learning_rate": 1e-3}


class Faulty:
    """Collects as a pusher does; what vLLM makes of it, on the first rank, is the case's."""

    def __init__(self, first: bool, *, pushes: str, probes: str) -> None:
        self.first, self.pushes, self.probes = first, list(pushes), list(probes)
        self.differs: list[bool] = []

    def join(self, receivers: Any) -> None:
        pass

    def lost(self) -> list[Any]:
        return []

    def push(self, policy: Any, version: int, *, must_differ: bool) -> None:
        policy.weights()
        self.differs.append(must_differ)
        self._come_to(self.pushes.pop(0))

    def probe(self, policy: Any, batch: Any, version: int) -> dict[str, float]:
        policy.logprobs(batch.token_ids[:1])
        self._come_to(self.probes.pop(0))
        return {"sync/mismatch_mean": 0.0} if self.first else {}

    def _come_to(self, end: str) -> None:
        from rl.weights.pusher import NoReceiver

        if self.first and end == "x":
            time.sleep(SLOW_S)
            raise NoReceiver("vLLM is out of reach")


def deliveries(cases: Any) -> dict[str, list[Any]]:
    """What each rank comes to, by case."""
    from tests.support.policy_setup import PlainSteps

    policy = cases.policy("float32", "zero3", PlainSteps())
    batch = cases.batch(cases.rows).micro_batches[0]

    def outcome(pushes: str, probes: str, newcomers: int, stop: bool) -> Any:
        from rl.run.failure import RunFailed
        from rl.trainer import delivery

        delivery._NOTICED_S = 0.3
        left = [newcomers]

        def arrive() -> list[object]:
            left[0] -= 1
            return [object()] if left[0] >= 0 and pusher.differs else []

        run_folder = SimpleNamespace(stop_request=SimpleNamespace(exists=lambda: stop))
        replicas: Any = SimpleNamespace(newcomers=arrive, living={})
        pusher: Any = Faulty(cases.ranks.first, pushes=pushes, probes=probes)
        runs: Any = run_folder
        it = delivery.Delivery(pusher, replicas, policy, cases.ranks, runs)
        try:
            came: Any = it.bring(1, batch, dict(STATS), lambda name, doing: nullcontext())
        except RunFailed as error:
            came = str(error)
        return [came, pusher.differs]

    found = {
        "live": outcome(".", ".", 0, False),
        "stop after push": outcome("x", "", 0, True),
        "stop after probe": outcome(".", "x", 0, True),
        "again after push": outcome("x.", ".", 2, False),
        "again after probe": outcome("..", "x.", 2, False),
        "fail": outcome("x", "", 0, False),
    }
    every: list[Any] = [None] * cases.ranks.world
    dist.all_gather_object(every, found)
    return {name: [one[name] for one in every] for name in found}
