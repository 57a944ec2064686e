"""A chat endpoint on the loopback interface whose model is the policy in training.

    POST /v1/chat/completions     X-Session-ID says which episode asks

Plain and streamed requests are answered; a streamed turn comes in one piece.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from envs.messages import Message
from envs.protocol import ContextFull, Speak, Spoken

MODEL = "policy"
SESSION = "X-Session-ID"
_LONGEST_REQUEST = 1 << 30  # bytes; a conversation may be long


@dataclass
class PolicyEndpoint:
    """Speakers by session; an episode has its session here for as long as it is played."""

    speakers: dict[str, Speak] = field(default_factory=dict)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yield the base URL."""
        app = web.Application(client_max_size=_LONGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._answer)
        # An episode that timed out hangs up: its request must not keep vLLM busy.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        speak = self.speakers.get(request.headers.get(SESSION, ""))
        if speak is None:
            return _refused(409, "no_such_session", "this episode has ended")
        body = await request.json()
        messages = [_readable(message) for message in body["messages"]]
        tools = [tool["function"] for tool in body.get("tools") or []]
        try:
            spoken = await speak(messages, tools or None)
        except ContextFull as full:
            return _refused(400, "context_length_exceeded", str(full))
        if body.get("stream"):
            return web.Response(body=_events(spoken), content_type="text/event-stream")
        return web.json_response(completion(spoken))


def completion(spoken: Spoken) -> dict[str, Any]:
    """A turn as the endpoint's answer."""
    choice = {"index": 0, "message": _wire(spoken.message), "finish_reason": _reason(spoken)}
    return _frame("chat.completion", [choice], spoken)


def _events(spoken: Spoken) -> bytes:
    """The same as a stream of two chunks: all that was said, then why it ended."""
    delta = _wire(spoken.message)
    for index, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = index
    content = {"index": 0, "delta": delta, "finish_reason": None}
    ending = {"index": 0, "delta": {}, "finish_reason": _reason(spoken)}
    chunks = [_frame("chat.completion.chunk", [choice], spoken) for choice in (content, ending)]
    # Clients put the chunks of one answer together by their id.
    chunks[1]["id"] = chunks[0]["id"]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def _frame(kind: str, choices: list[dict[str, Any]], spoken: Spoken) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": spoken.prompt_tokens,
            "completion_tokens": spoken.completion_tokens,
            "total_tokens": spoken.prompt_tokens + spoken.completion_tokens,
        },
    }


def _reason(spoken: Spoken) -> str:
    if spoken.cut_off:
        return "length"
    return "tool_calls" if spoken.message.get("tool_calls") else "stop"


def _wire(message: Message) -> Message:
    """Arguments travel as JSON text; a call that cannot be parsed, as the policy wrote it."""
    calls = [
        {"id": call["id"], "type": "function", "function": _as_text(call["function"])}
        for call in message.get("tool_calls") or []
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": function["name"], "arguments": text}


def _readable(message: Message) -> Message:
    """A message with text as content; parts that are no text are refused."""
    content = message.get("content")
    if not isinstance(content, list):
        return message | {"content": content or ""}
    kinds = {part["type"] for part in content} - {"text"}
    if kinds:
        raise web.HTTPBadRequest(text=f"the policy reads text, not {sorted(kinds)}")
    return message | {"content": "".join(part["text"] for part in content)}


def _refused(status: int, code: str, text: str) -> web.Response:
    error = {"message": text, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)
