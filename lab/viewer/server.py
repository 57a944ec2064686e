"""Serve the viewer's page on the loopback interface, under a secret key in the address.

Every user of this machine can reach the port, so every path begins with the key. The content
security policy forbids requests to other hosts, scripts of other origins, and inline scripts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from lab.viewer import answers
from lab.viewer.export import STATIC, page
from lab.viewer.index import RunIndex

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_WRONG_KEY = "This is not the address that view.py printed: its key is missing or wrong."


class _Selection(msgspec.Struct):
    run: int
    n: list[int]


def application(indexes: Sequence[RunIndex], names: Sequence[str], key: str) -> Starlette:
    def table(index: RunIndex, query: Any) -> Any:
        index.refresh()
        return answers.table(index, int(query["start"]), int(query["generation"]))

    answer_by_name: dict[str, Callable[[RunIndex, Any], Any]] = {
        "table": table,
        "rollouts": lambda index, query: answers.rollouts(
            index, [int(n) for n in query["n"].split(",") if n]
        ),
        "tokens": lambda index, query: answers.tokens(index, [int(query["n"])])[0],
        "search": lambda index, query: answers.search(index, query["q"]),
    }

    def endpoint_of(answer: Callable[[RunIndex, Any], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            query = request.query_params
            try:
                return _json_response(answer(indexes[int(query["run"])], query))
            except (KeyError, ValueError, IndexError, OSError) as error:
                problem = f"this request cannot be answered: {error}"
                return PlainTextResponse(problem, status_code=400)

        return endpoint

    async def export(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body(), type=_Selection)
            chosen = (indexes[wanted.run], names[wanted.run], wanted.n)
            text = await run_in_threadpool(page, [chosen])
        except (ValueError, IndexError, OSError) as error:
            return PlainTextResponse(str(error), status_code=400)
        return Response(text, media_type="text/html")

    routes = [
        Route("/", lambda _: FileResponse(STATIC / "index.html")),
        Route("/runs", lambda _: _json_response(list(names))),
        Route("/export", export, methods=["POST"]),
        *(Route(f"/{name}", endpoint_of(answer)) for name, answer in answer_by_name.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    wrong = Route("/{path:path}", lambda _: PlainTextResponse(_WRONG_KEY, status_code=404))
    return Starlette(
        routes=[Mount(f"/{key}", routes=routes), wrong],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_with_headers)],
    )


def _json_response(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _with_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(_HEADERS)
    return response
