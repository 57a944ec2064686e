"""Define faults of the scripted vLLM, which a JSON file lists as objects.

    [{"fault": "Status", "at": 3, "status": 500}, {"fault": "Exit", "at": 9}]

Requests are counted by path from 0; those of the weight probe have the path "probe".
"""

import asyncio
import json
import os
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
    """Change the requests number at, ..., at + times - 1 to one path, counted from 0."""

    at: int = 0
    times: int = 1
    path: str = "/inference/v1/generate"

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        """Answer the request wrongly; `answer` is the correct handler."""
        response = await answer(request)
        assert isinstance(response, web.Response)
        body = json.loads(response.text or "")
        for choice in body.get("choices", []):
            self.spoil(choice)
        return web.json_response(body)

    def spoil(self, choice: dict[str, Any]) -> None:
        """Change one completion in place."""


@dataclass(frozen=True, kw_only=True)
class Status(Fault):
    """Refuse the request with a status."""

    status: int

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "scripted"}}, status=self.status)


class Garbage(Fault):
    """Answer with status 200 and a page that is no JSON."""

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>" + "\x00" * 99)


@dataclass(frozen=True, kw_only=True)
class Hang(Fault):
    """Answer late."""

    seconds: float

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.seconds)
        return await answer(request)


class CutShort(Fault):
    """Close the connection in the middle of the body."""

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


class Exit(Fault):
    """End the process with status 3."""

    async def __call__(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        os._exit(3)


class TwoVersions(Fault):
    """Mark the first half of a completion as sampled one version earlier, as after a push."""

    def spoil(self, choice: dict[str, Any]) -> None:
        (span,) = choice["weight_versions"]
        half = span["end"] // 2
        older = {"start": 0, "end": half, "version": str(int(span["version"]) - 1)}
        choice["weight_versions"] = [older, {**span, "start": half}] if half else [span]


class Abort(Fault):
    """Return half a completion that neither the policy nor a limit ended."""

    def spoil(self, choice: dict[str, Any]) -> None:
        half = len(choice["token_ids"]) // 2
        versions = [{**span, "end": half} for span in choice["weight_versions"] if half]
        content = choice["logprobs"]["content"][:half]
        choice |= {"token_ids": choice["token_ids"][:half], "logprobs": {"content": content}}
        choice |= {"finish_reason": "abort", "stop_reason": None, "weight_versions": versions}


def read_faults(path: Path) -> list[Fault]:
    """Return the faults that a file lists."""
    kinds = {kind.__name__: kind for kind in Fault.__subclasses__()}
    return [kinds[entry.pop("fault")](**entry) for entry in json.loads(path.read_text())]


def middleware(faults: Sequence[Fault]) -> Any:
    """Apply the faults to their requests (aiohttp passes `handler` by its name)."""
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
