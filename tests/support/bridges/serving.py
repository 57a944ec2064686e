"""Serve a scripted chat endpoint in a thread, for libraries with their own client."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from envs.messages import Message
from envs.protocol import Spoken
from envs.verifiers.endpoint import completion


@dataclass
class ScriptedEndpoint:
    """Answer every request with the result of `speak`, and keep the bodies."""

    speak: Callable[[list[Message]], Message]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        spoken = Spoken(self.speak(body["messages"]), False, 10, 5)
        return web.json_response(completion(spoken))

    @contextmanager
    def serving(self) -> Iterator["ScriptedEndpoint"]:
        loop, started = asyncio.new_event_loop(), threading.Event()

        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self._answer)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            started.set()
            return runner

        def run() -> None:
            runner = loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


def reverse_half(messages: list[Message]) -> Message:
    """Answer `reverse: ...`, correctly except for words that begin with a to m."""
    word = messages[-1]["content"].removeprefix("reverse: ")
    return {"role": "assistant", "content": word[::-1] if word > "n" else word}


def sort_the_first(messages: list[Message]) -> Message:
    """Answer `sort: ...` correctly in every turn."""
    names = next(m["content"] for m in messages if m["role"] == "user").removeprefix("sort: ")
    return {"role": "assistant", "content": " ".join(sorted(names.split()))}


def use_the_adder(messages: list[Message]) -> Message:
    """Call `add` first, then repeat its answer."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": messages[-1]["content"]}
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
