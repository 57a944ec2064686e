"""The vLLMs of a run, seen by who asks them: which have the live weights, who died, how busy."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rl.inference.replica import Replica, names_of, started_replicas
from rl.inference.router import Route, Router
from rl.inference.routes import PrefixCache, prefix_cache
from rl.run.endpoint import request_restart
from rl.run.folder import RunFolder

_LOOK_EVERY_S = 1.0


class Replicas:
    """Keeps the router in step with the trainer, which pushes, and the supervisor, which starts."""

    def __init__(self, run_folder: RunFolder, inference: Mapping[str, Any]) -> None:
        self.router = Router(self._given_up)
        self._run_folder, self._inference = run_folder, inference
        self._alone = len(names_of(inference)) == 1
        self._caches: dict[Route, PrefixCache] = {}  # as they were at the last look

    def _given_up(self, replica: Replica, why: str) -> None:
        # Where the supervisor has noticed by itself, this start of it is over, and nothing comes.
        request_restart(self._run_folder, replica.name, replica.incarnation, why)

    def publish(self, incarnations: Mapping[str, int]) -> None:
        """These have the live weights, by name; one that was started again since has lost them."""
        started = started_replicas(self._run_folder, self._inference)
        self.router.serve(r for r in started if incarnations.get(r.name) == r.incarnation)

    async def watch(self) -> None:
        """Lose whoever the supervisor starts again, for ever: a request would wait for nothing."""
        while not self._alone:
            await asyncio.sleep(_LOOK_EVERY_S)
            # In a thread: the run's folder may lie on a disk that is far away, or busy.
            started = await asyncio.to_thread(started_replicas, self._run_folder, self._inference)
            newest = {replica.name: replica.incarnation for replica in started}
            for route in self.router.routes:
                if newest[route.replica.name] != route.replica.incarnation:
                    self.router.lose(route, "it is being started again")

    async def metrics(self) -> dict[str, float]:
        """What they did since the last look; nothing where there is but one."""
        if self._alone:
            return {}
        started = started_replicas(self._run_folder, self._inference)
        metrics: dict[str, float] = {
            "inference/replicas_alive": len(self.router.routes),
            "inference/restarts": sum(replica.incarnation for replica in started),
        }
        routes = self.router.routes
        caches = await asyncio.gather(
            *(asyncio.to_thread(prefix_cache, route.replica) for route in routes)
        )
        for route, cache in zip(routes, caches, strict=True):
            name = route.replica.name
            metrics[f"{name}/groups"] = route.num_groups
            metrics[f"{name}/completions"], route.num_completions = route.num_completions, 0
            metrics[f"{name}/tokens"], route.num_tokens = route.num_tokens, 0
            if cache is not None:
                metrics[f"{name}/prefix_hits"] = cache.share_since(self._caches.get(route))
                self._caches[route] = cache
        return metrics
