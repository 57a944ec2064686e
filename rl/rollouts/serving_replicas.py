"""Route the requests of the rollouts process to the vLLM replicas that have the newest weights."""

import asyncio
from collections.abc import Mapping

from rl.config.nodes import InferenceNode
from rl.inference.replica import Replica, started_replicas
from rl.inference.router import Route, Router
from rl.inference.routes import prefix_cache_counts
from rl.runtime.endpoint import Endpoint, request_restart
from rl.runtime.folder import RunFolder

_CHECK_INTERVAL_S = 1.0


class ServingReplicas:
    def __init__(self, run_folder: RunFolder, inference: InferenceNode) -> None:
        self.router = Router(self._request_restart, self._was_restarted)
        self._run_folder, self._inference = run_folder, inference
        self._only_one = len(inference.names) == 1
        # (queries, hits) of each replica's prefix cache at the last `metrics` call:
        self._caches: dict[Route, tuple[float, float]] = {}

    def _request_restart(self, replica: Replica, why: str) -> None:
        # The supervisor ignores a request for an incarnation that it has already replaced.
        request_restart(self._run_folder, replica.name, replica.incarnation, why)

    def _was_restarted(self, replica: Replica) -> bool:
        endpoint = Endpoint.read(self._run_folder, replica.name)
        return endpoint is not None and endpoint.incarnation != replica.incarnation

    def publish(self, incarnations: Mapping[str, int]) -> None:
        """Route requests to the replicas that got the new weights and have not restarted since."""
        started = started_replicas(self._run_folder, self._inference)
        self.router.serve(r for r in started if incarnations.get(r.name) == r.incarnation)

    async def watch(self) -> None:
        """Until cancelled, tell the router which replicas the supervisor has restarted."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            for route in self.router.routes:
                # Read in a thread, because the run folder may be on a slow disk.
                if await asyncio.to_thread(self._was_restarted, route.replica):
                    self.router.lose(route, "the supervisor has restarted it")

    async def metrics(self) -> dict[str, float]:
        """Return load, cache hits and restarts of the replicas, or {} if the run has only one."""
        if self._only_one:
            return {}
        started = started_replicas(self._run_folder, self._inference)
        metrics: dict[str, float] = {
            "inference/replicas_alive": len(self.router.routes),
            "inference/restarts": sum(replica.incarnation for replica in started),
        }
        routes = self.router.routes
        caches = await asyncio.gather(
            *(asyncio.to_thread(prefix_cache_counts, route.replica) for route in routes)
        )
        for route, cache in zip(routes, caches, strict=True):
            name = route.replica.name
            metrics[f"{name}/groups"] = route.num_groups
            metrics[f"{name}/completions"], route.num_completions = route.num_completions, 0
            metrics[f"{name}/tokens"], route.num_tokens = route.num_tokens, 0
            if cache is not None:
                before = self._caches.get(route, (0.0, 0.0))
                queries, hits = cache[0] - before[0], cache[1] - before[1]
                metrics[f"{name}/prefix_hits"] = hits / queries if queries else 0.0
                self._caches[route] = cache
        return metrics
