"""Serve scripted answers over HTTP in threads of the test's process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any, Self

from tests.support.listening import PostHandler, served


def completion(content: Any, **more: Any) -> dict[str, Any]:
    """Return the answer of /chat/completions whose message has this content and more keys."""
    message = {"role": "assistant", "content": content, **more}
    reason = "tool_calls" if more.get("tool_calls") else "stop"
    choices = [{"message": message, "finish_reason": reason}]
    return {"choices": choices, "usage": {"completion_tokens": 7}}


class Answers:
    """Answer request i with answers[i], and every later request with the last answer.

    An answer is (status, body) or (status, body, headers). A body is bytes, text, an object that is
    sent as JSON, or an iterator of bytes that are sent one by one.
    """

    def __init__(self, *answers: tuple[Any, ...], seconds: float = 0.0) -> None:
        """`seconds` is the time before each answer."""
        self.answers, self.seconds = answers, seconds
        self.url = ""
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    def answer(self, path: str, body: Any, number: int) -> tuple[Any, ...]:
        """Return the answer to a request; `number` counts requests from 0."""
        return self.answers[min(number, len(self.answers) - 1)]

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Listen on the loopback interface during the block; yield the URL with /v1."""
        script = self

        class Handler(PostHandler):
            def reply(self, body: Any) -> tuple[Any, ...]:
                return script._answered(self.path, body, self.headers)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        with served(Server(("127.0.0.1", port), Handler)) as server:
            yield f"http://127.0.0.1:{server.server_port}/v1"

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Serve during the block; yield this object with its `url`."""
        with self.serving() as self.url:
            yield self

    def _answered(self, path: str, body: Any, headers: Any) -> tuple[Any, ...]:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(self.seconds)
            return self.answer(path, body, number)
        finally:
            with self._lock:
                self._at_once -= 1
