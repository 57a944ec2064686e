"""Middleware inside vLLM that requires the run's key on every route of a TCP port.

vLLM's own --api-key protects only the routes below /v1, but routes outside /v1 load weights. An
environment variable names the file with the key, because a key on the command line would be visible
to all users of the machine.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

GUARD = "rl.inference.key_guard.KeyGuard"
KEY_FILE = "OFFBYONE_KEY_FILE"

Call = Callable[..., Awaitable[Any]]

_REFUSED = b"the request has no key or a wrong key: send `Authorization: Bearer <key of the run>`"


class KeyGuard:
    def __init__(self, app: Call) -> None:
        self._app = app
        self._expected = f"Bearer {Path(os.environ[KEY_FILE]).read_text().strip()}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Call, send: Call) -> None:
        keys = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        # The duration of compare_digest does not depend on the characters, so it reveals none.
        has_key = len(keys) == 1 and hmac.compare_digest(keys[0], self._expected)
        # Let `lifespan` pass, which uvicorn sends when it starts and stops. No client can send it.
        if has_key or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})
