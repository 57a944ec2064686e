"""Runs inside vLLM where it listens on a port: no route of it answers without the run's key.

vLLM's own --api-key covers the routes below /v1 alone, and others load weights. Given to vLLM as
`--middleware`; the key is in a file that its environment names, so no list of processes shows it.
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
    """An ASGI application in front of another."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {Path(os.environ[KEY_FILE]).read_text().strip()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what has the key; everything else is refused, whatever it asks for."""
        # `lifespan` is uvicorn's own, at the start and at the end; it comes from no connection.
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
        # In constant time: how long it takes says nothing of how much of a guess is right.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
