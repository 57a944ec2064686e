"""Serve scripted answers to posts, one request at a time."""

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, TCPServer, UnixStreamServer
from typing import Any


class PostHandler(BaseHTTPRequestHandler):
    """Answer a post with the result of `answer`, or with 500 and its error."""

    def answer(self, body: dict[str, Any]) -> bytes | dict[str, Any]:
        """Return text as bytes, or an object that is sent as JSON."""
        raise NotImplementedError

    def reply(self, body: Any) -> tuple[Any, ...]:
        """Return the status, the content and perhaps headers."""
        try:
            return 200, self.answer(body)
        except RuntimeError as error:
            return 500, {"error": {"message": str(error)}}

    def do_POST(self):
        posted = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, content, *headers = self.reply(json.loads(posted or "{}"))
        self.send_response(status)
        if isinstance(content, dict | list):
            content = json.dumps(content)
            self.send_header("content-type", "application/json")
        for name, value in dict(*headers).items():
            self.send_header(name, value)
        self.end_headers()
        content = content.encode() if isinstance(content, str) else content
        for part in [content] if isinstance(content, bytes) else content:
            with suppress(OSError):  # the client has gone
                self.wfile.write(part)

    do_GET = do_POST

    def log_message(self, format, *args):
        pass

    def address_string(self):
        return "a socket"


@contextmanager
def served(server: BaseServer) -> Iterator[Any]:
    """Serve in a thread until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def listening(
    socket: Path | None, handler: type[PostHandler]
) -> AbstractContextManager[UnixStreamServer | TCPServer]:
    """Serve in a thread until the block ends; None: on a port of this host."""
    return served(
        UnixStreamServer(str(socket), handler) if socket else TCPServer(("127.0.0.1", 0), handler)
    )
