"""Runs inside vLLM where it listens on a port: every route asks for the run's key.

vLLM's own --api-key covers only the routes below /v1, and other routes load weights. vLLM gets this
class as `--middleware`. An environment variable names the file of the key, so that process lists do
not show the key.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

GUARD = "rl.inference.key_guard.KeyGuard"
KEY_FILE = "OFFBYONE_KEY_FILE"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REFUSED = b"the key of the run is missing or wrong"


class KeyGuard:
    """An ASGI application in front of another one."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {Path(os.environ[KEY_FILE]).read_text().strip()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests that have the key; refuse all others."""
        # uvicorn itself sends `lifespan` at its start and end; no connection can.
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # In constant time, so that the duration does not tell how much of a guess is right.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
