"""Where the rollouts process listens: a Unix socket, or a port that asks each rank for the key.

Over TCP a connection's first message is the run's key. Without it nothing is answered, and nothing
of what was sent is read as a call.
"""

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rl.run.address import Address
from rl.run.endpoint import Endpoint
from rl.run.folder import RunFolder
from rl.wire import HEADER

_KEY_WITHIN_S = 10.0
_LONGEST_KEY = 1 << 10

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(run_folder: RunFolder, serve: Serve, host: str | None) -> AsyncIterator[None]:
    """Serve ranks for as long as the block lasts; without a `host` address on the run's socket."""
    if host is None:
        server = await asyncio.start_unix_server(serve, run_folder.private.rollouts_socket)
    else:
        key = run_folder.private.key.read_bytes()
        server = await asyncio.start_server(_guarded(serve, key), host, 0)
        port = server.sockets[0].getsockname()[1]
        Endpoint(Address(host=host, port=port), pid=os.getpid()).write(run_folder, "rollouts")
    try:
        yield
    finally:
        # Not awaited: since Python 3.12.1 that waits for ranks, which wait for us.
        server.close()


def _guarded(serve: Serve, key: bytes) -> Serve:
    """Return what serves those alone that know the key."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await _knows(reader, key):
            await serve(reader, writer)
        else:
            writer.close()

    return guarded


async def _knows(reader: asyncio.StreamReader, key: bytes) -> bool:
    """Whether a connection begins with the key; whoever is slow to say it does not."""
    try:
        async with asyncio.timeout(_KEY_WITHIN_S):
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            said = await reader.readexactly(size) if size <= _LONGEST_KEY else b""
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return False
    return hmac.compare_digest(said, key)
