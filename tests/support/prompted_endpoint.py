"""Serve an OpenAI-compatible endpoint: a policy that obeys its system prompt, and a teacher.

The policy is asked to reverse a word (env=reverse-text). It writes a word backwards if its system
prompt says "backwards" (only a short word if it also says "short"), and else repeats it.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHORT = 4  # letters


@dataclass
class PromptedEndpoint:
    """Hold the options, the received requests and the state of the endpoint.

    Attributes:
        proposals: answers of the teacher in order; the last one is repeated.

    """

    proposals: Sequence[str] = ("```\nWrite the word backwards.\n```",)
    key: str = ""  # the required key; "": none
    url: str = ""
    policy_asked: list[tuple[str, str]] = field(default_factory=list)  # system prompt, word
    teacher_asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict) -> tuple[int, str]:
        """Return the status and content of a completion."""
        messages = {message["role"]: message["content"] for message in body["messages"]}
        with self.lock:
            if body["model"] == "teacher" or "feedback" in messages["user"]:
                self.teacher_asked.append(messages["user"])
                index = min(len(self.teacher_asked), len(self.proposals)) - 1
                return 200, self.proposals[index]
            system, word = messages.get("system", ""), messages["user"].removeprefix("reverse: ")
            self.policy_asked.append((system, word))
        obeys = "backwards" in system and (len(word) <= SHORT or "short" not in system)
        return 200, word[::-1] if obeys else word

    @contextmanager
    def listening(self) -> Iterator["PromptedEndpoint"]:
        """Listen on the loopback interface while the block lasts."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                allowed = self.headers.get("Authorization", "") == endpoint.bearer
                self.reply(200 if allowed else 401, {"data": []})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers.get("Authorization", "") != endpoint.bearer:
                    return self.reply(401, {})
                status, content = endpoint.answer(body)
                choice = {"message": {"content": content}, "finish_reason": "stop"}
                return self.reply(status, {"choices": [choice], "usage": {"completion_tokens": 5}})

            def reply(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # a search connects many times at once

        with Server(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()

    @property
    def bearer(self) -> str:
        return f"Bearer {self.key}" if self.key else ""

    def overrides(self, **more: object) -> list[str]:
        """Return overrides of optimize_prompt.py that use it as policy and teacher."""
        values = {
            "client": "messages",
            "client.url": self.url,
            "client.model": "policy",
            "client.max_retries": 0,
            "reflection.base_url": self.url,
            "reflection.model": "teacher",
            "reflection.max_retries": 0,
            "sampler.max_tokens": 32,
            "max_seq_len": 256,
            "num_train": 12,
            "num_val": 10,
            "max_calls": 80,
            "env.system_prompt": "Say the word.",
            **more,
        }
        return [f"{key}={value}" for key, value in values.items()]
