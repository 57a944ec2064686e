"""The page and what it asks for, on the loopback interface, behind a key in the address.

    /<key>/  page    runs  table  rollouts  tokens  search  where  export    JSON, one file to mail

Whoever is on this machine can reach the port, so every path begins with the key. The page's policy
lets it load nothing from elsewhere and run nothing but its own modules.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.viewer import answers
from rl.viewer.export import STATIC, Chosen, page
from rl.viewer.index import RunIndex

_HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; "
    b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}
_WRONG_KEY = "This address is not the one that view.py printed: its key is missing or another's."


class _Selection(msgspec.Struct):
    """What a page asks to be exported."""

    run: int
    n: list[int]


def new_key() -> str:
    """Return a key that nobody guesses."""
    return secrets.token_urlsafe(12)


def application(indexes: Sequence[RunIndex], names: Sequence[str], key: str) -> Starlette:
    """Return what serves these runs, each under its name, to those who have the key."""

    def asked(request: Request) -> RunIndex:
        return indexes[int(request.query_params["run"])]

    def table(request: Request) -> Any:
        index, of = asked(request), request.query_params
        index.refresh()
        return answers.table(index, int(of["start"]), int(of["generation"]))

    def rollouts(request: Request) -> Any:
        numbers = request.query_params["n"].split(",")
        return answers.rollouts(asked(request), [int(n) for n in numbers if n])

    def tokens(request: Request) -> Any:
        return answers.tokens(asked(request), int(request.query_params["n"]))

    def search(request: Request) -> Any:
        return answers.search(asked(request), request.query_params["q"])

    def where(request: Request) -> Any:
        return answers.where(asked(request), request.query_params["q"])

    async def export(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body(), type=_Selection)
            chosen = Chosen(indexes[wanted.run], names[wanted.run], wanted.n)
            # A thread, for it may take long, and whoever looks at the run meanwhile waits for none.
            text = await run_in_threadpool(page, [chosen])
        except (ValueError, IndexError, OSError) as error:
            return PlainTextResponse(str(error), status_code=400)
        return Response(text, media_type="text/html")

    routes = [
        Route("/", lambda _: FileResponse(STATIC / "index.html")),
        Route("/runs", _json(lambda _: list(names))),
        Route("/export", export, methods=["POST"]),
        *(
            Route(f"/{ask.__name__}", _json(ask))
            for ask in (table, rollouts, tokens, search, where)
        ),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=[Mount(f"/{key}", routes=routes), Route("/{path:path}", _wrong_key)],
        middleware=[Middleware(_WithHeaders)],
    )


def _json(ask: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """An endpoint, in a thread of its own, out of what answers a request."""

    def answer(request: Request) -> Response:
        try:
            return Response(msgspec.json.encode(ask(request)), media_type="application/json")
        except (KeyError, ValueError, IndexError, OSError) as error:
            return PlainTextResponse(f"this cannot be answered: {error}", status_code=400)

    return answer


def _wrong_key(_: Request) -> Response:
    return PlainTextResponse(_WRONG_KEY, status_code=404)


class _WithHeaders:
    """Puts our headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        await self._app(scope, receive, with_headers)
