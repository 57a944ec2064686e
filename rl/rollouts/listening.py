"""Accept connections of trainer ranks on a Unix socket, or on a TCP port with a key.

Over TCP the first message of a connection must be the run's key. The rollouts process closes a
connection that begins with any other message.
"""

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.wire import HEADER

_KEY_TIMEOUT_S = 10.0
_MAX_KEY_BYTES = 1 << 10

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def open_server(run_folder: RunFolder, serve: Serve, host: str | None) -> AsyncIterator[None]:
    """Accept ranks during the block: by TCP on `host`, or on a Unix socket if `host` is None."""
    if host is None:
        server = await asyncio.start_unix_server(serve, run_folder.private.rollouts_socket)
    else:
        key = run_folder.private.key.read_bytes()

        async def check_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await _sends_key(reader, key):
                await serve(reader, writer)
            else:
                writer.close()

        server = await asyncio.start_server(check_key, host, 0)
        port = server.sockets[0].getsockname()[1]
        Endpoint(Address(host=host, port=port), pid=os.getpid()).write(run_folder, "rollouts")
    try:
        yield
    finally:
        # Do not call wait_closed(). Since Python 3.12.1 it waits until the ranks disconnect, but
        # after an error a rank may wait for an answer until this process ends.
        server.close()


async def _sends_key(reader: asyncio.StreamReader, key: bytes) -> bool:
    try:
        async with asyncio.timeout(_KEY_TIMEOUT_S):
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            sent = await reader.readexactly(size) if size <= _MAX_KEY_BYTES else b""
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return False
    return hmac.compare_digest(sent, key)
