"""Serve routes of vLLM on a Unix socket, one request at a time."""

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, TCPServer, UnixStreamServer
from typing import Any


class PostHandler(BaseHTTPRequestHandler):
    """Answer a post with the result of `answer`, or with 500 and its error."""

    def answer(self, body: dict[str, Any]) -> bytes | dict[str, Any]:
        """Return text as bytes, or an object that is sent as JSON."""
        raise NotImplementedError

    def posted(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")

    def do_POST(self):
        status = 200
        try:
            reply = self.answer(self.posted())
        except RuntimeError as error:
            status, reply = 500, {"error": {"message": str(error)}}
        prose = isinstance(reply, bytes)
        content = reply if prose else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if prose else "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

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
