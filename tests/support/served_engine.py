"""Serve routes of vLLM in the event loop of a test; the scripted engine answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rl.inference.client import RequestTally, VLLMClient
from rl.inference.router import Router
from rl.sampling.renderer_chat import render
from tests.support.engine_faults import Fault, middleware
from tests.support.replicas import replica_at
from tests.support.scripted import HI, IM_END, tiny_model, tiny_renderer
from tests.support.scripted_vllm import Engine

GENERATE = "/inference/v1/generate"
PROMPT = render(tiny_renderer(), list(HI))
SAMPLING = {"temperature": 1.0, "max_tokens": 32, "stop_token_ids": [IM_END]}


@asynccontextmanager
async def serving(
    routes: dict[str, Callable[..., Any]], socket: Path | None, *middlewares: Any
) -> AsyncIterator[tuple[web.AppRunner, int]]:
    """Serve the routes at a socket until the block ends; None: on a port of this host."""
    app = web.Application(middlewares=middlewares)
    for path, answer in routes.items():
        app.router.add_route("*", path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    unix = web.UnixSite(runner, str(socket), backlog=2048)  # as uvicorn, so vLLM
    site = unix if socket else web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner, 0 if socket else site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


class ServedEngine:
    """A scripted vLLM behind a socket, and the bodies that were posted to it."""

    def __init__(self, model: Path, socket: Path, name: str = "inference") -> None:
        self.engine, self.bodies, self.replica = Engine(model, 256), [], replica_at(socket, name)
        self.socket, self.tally = socket, RequestTally()

    async def generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return await self.engine.generate(request)

    def client(self, router: Router | None = None, timeout: float = 5.0) -> VLLMClient:
        router = router or Router.with_replicas(self.replica)
        return VLLMClient(router, model="policy", timeout=timeout, tally=self.tally)

    @asynccontextmanager
    async def serving(self, faults: Sequence[Fault] = ()) -> AsyncIterator["ServedEngine"]:
        routes = {GENERATE: self.generate, "/tokenize": self.engine.tokenize}
        routes["/{path:.*}"] = self.engine.control
        async with serving(routes, self.socket, middleware(faults)) as (self.runner, _):
            yield self

    async def die(self) -> None:
        """Close the socket and every connection, like a killed process."""
        (site,) = self.runner.sites
        await site.stop()
        for connection in self.runner.server.connections:
            connection.transport.abort()


def served(folder: Path, *faults: Fault) -> Any:
    """Serve one engine in the folder until the block ends."""
    return ServedEngine(tiny_model(folder), folder / "vllm.sock").serving(faults)


async def a_group(client: VLLMClient, size: int) -> list[Any]:
    """Send requests of one group at the same time."""
    with client.group() as group:
        requests = (group.generate(PROMPT, SAMPLING, n=1, version=7) for _ in range(size))
        return await asyncio.gather(*requests)
