"""What a scripted vLLM does wrong: a list in a file of JSON, one object a fault.

    [{"fault": "Status", "at": 3, "status": 500}, {"fault": "SlowStart", "seconds": 5}]

Requests are counted by path from 0; those of the weight probe have the path "probe".
"""

import asyncio
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with requests number at, at + 1, ..., at + times - 1 to one path, from 0."""

    at: int = 0
    times: int = 1
    path: str = "/inference/v1/generate"

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        """Answer the request; `answer` would do it well."""
        response = await answer(request)
        assert isinstance(response, web.Response)
        body = json.loads(response.text or "")
        for choice in body.get("choices", []):
            self.spoil(choice)
        return web.json_response(body)

    def spoil(self, choice: dict[str, Any]) -> None:
        """Change one completion."""


@dataclass(frozen=True, kw_only=True)
class Status(Fault):
    """Refused."""

    status: int

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "scripted"}}, status=self.status)


@dataclass(frozen=True, kw_only=True)
class Hang(Fault):
    """Answered late."""

    seconds: float

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.seconds)
        return await answer(request)


@dataclass(frozen=True, kw_only=True)
class CutShort(Fault):
    """The connection ends in the middle of the body."""

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        whole = await answer(request)
        assert isinstance(whole, web.Response)
        body = (whole.text or "").encode()
        part = web.StreamResponse(headers={"Content-Type": "application/json"})
        part.content_length = len(body)
        await part.prepare(request)
        await part.write(body[: len(body) // 2])
        if request.transport:
            request.transport.close()
        return part


@dataclass(frozen=True, kw_only=True)
class GzipBomb(Fault):
    """A small body that unpacks to many MiB of spaces."""

    mib: int

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        packer = zlib.compressobj(wbits=31)
        body = b"".join(packer.compress(b" " * 2**20) for _ in range(self.mib)) + packer.flush()
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=body, headers=headers)


@dataclass(frozen=True, kw_only=True)
class Exit(Fault):
    """The process ends."""

    status: int = 1

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        os._exit(self.status)


@dataclass(frozen=True, kw_only=True)
class TwoVersions(Fault):
    """The first half of a completion was sampled one version earlier: a push came in between."""

    def spoil(self, choice: dict[str, Any]) -> None:
        (span,) = choice["weight_versions"]
        half = span["end"] // 2
        older = {"start": 0, "end": half, "version": str(int(span["version"]) - 1)}
        choice["weight_versions"] = [older, {**span, "start": half}] if half else [span]


@dataclass(frozen=True, kw_only=True)
class Abort(Fault):
    """Half a completion, which neither the policy nor a limit ended."""

    def spoil(self, choice: dict[str, Any]) -> None:
        half = len(choice["token_ids"]) // 2
        versions = [{**span, "end": half} for span in choice["weight_versions"] if half]
        content = choice["logprobs"]["content"][:half]
        choice |= {"token_ids": choice["token_ids"][:half], "logprobs": {"content": content}}
        choice |= {"finish_reason": "abort", "stop_reason": None, "weight_versions": versions}


@dataclass(frozen=True, kw_only=True)
class SlowStart(Fault):
    """Nothing listens yet: the server starts that much later."""

    seconds: float
    path: str = "(before the first request)"


def read_faults(path: Path) -> list[Fault]:
    """The faults that a file names."""
    kinds = {kind.__name__: kind for kind in Fault.__subclasses__()}
    return [kinds[entry.pop("fault")](**entry) for entry in json.loads(path.read_text())]


def middleware(faults: Sequence[Fault]) -> Any:
    """Let the faults that are due have the request (aiohttp passes `handler` by its name)."""
    time.sleep(sum(fault.seconds for fault in faults if isinstance(fault, SlowStart)))
    requests = Counter[str]()

    @web.middleware
    async def spoiled(request: web.Request, handler: Answer) -> web.StreamResponse:
        path = "probe" if b'"prompt_logprobs"' in await request.read() else request.path
        number, requests[path] = requests[path], requests[path] + 1
        for fault in faults:
            if fault.path == path and fault.at <= number < fault.at + fault.times:
                handler = partial(fault, handler)
        return await handler(request)

    return spoiled
