"""A chat endpoint (OpenAI API) on 127.0.0.1 whose model is the policy in training.

    POST /v1/chat/completions     the header X-Session-ID or the API key identifies the episode

A request may ask for a stream, in which one chunk contains the whole turn. The run's sampler
decides how tokens are sampled, so the request's temperature and limits have no effect.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from envs.messages import Message, to_api_format
from envs.protocol import ContextFull, PolicyTurn

MODEL = "policy"
SESSION = "X-Session-ID"
GetTurn = Callable[[list[Message], Any], Awaitable[PolicyTurn]]  # (messages, tools) -> turn


@dataclass
class PolicyEndpoint:
    """A chat endpoint for concurrent episodes."""

    get_turn_by_key: dict[str, GetTurn] = field(default_factory=dict)  # by session id or API key

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server while the context is open, and yield its base URL."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._answer_request)
        # With handler_cancellation a disconnect cancels `_answer_request`, so vLLM stops sampling.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _answer_request(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        get_turn = self.get_turn_by_key.get(request.headers.get(SESSION, key))
        if get_turn is None:
            text = "this episode has ended, or the request has another key than OPENAI_API_KEY"
            return _error_response(401, "no_such_session", text)
        try:
            body = await request.json()
            messages = [m | {"content": plain_text(m.get("content"))} for m in body["messages"]]
            tools = [tool["function"] for tool in body.get("tools") or []]
            if body.get("n") not in (None, 1):
                raise ValueError(f"n={body['n']}: the policy returns one answer: remove n")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return _error_response(400, "invalid_request", f"{type(error).__name__}: {error}")
        try:
            turn = await get_turn(messages, tools or None)
        except ContextFull as full:
            return _error_response(400, "context_length_exceeded", str(full))
        if body.get("stream"):
            return web.Response(body=_stream_chunks(turn), content_type="text/event-stream")
        return web.json_response(completion(turn))


def completion(turn: PolicyTurn) -> dict[str, Any]:
    """Return a turn as a chat completion of the OpenAI API."""
    message, reason = to_api_format(turn.message), _finish_reason(turn)
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return _response("chat.completion", [choice], turn)


def _stream_chunks(turn: PolicyTurn) -> bytes:
    delta = to_api_format(turn.message)
    for index, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = index
    content = {"index": 0, "delta": delta, "finish_reason": None}
    ending = {"index": 0, "delta": {}, "finish_reason": _finish_reason(turn)}
    chunks = [_response("chat.completion.chunk", [choice], turn) for choice in (content, ending)]
    # Give both chunks the same id, by which clients join them.
    chunks[1]["id"] = chunks[0]["id"]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def _response(kind: str, choices: list[dict[str, Any]], turn: PolicyTurn) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        },
    }


def _finish_reason(turn: PolicyTurn) -> str:
    if turn.cut_off:
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def plain_text(content: Any) -> str:
    """Return the text of a message's content. Raise ValueError if a part is not text."""
    if not isinstance(content, list):
        return content or ""
    kinds = {part["type"] for part in content} - {"text"}
    if kinds:
        raise ValueError(f"the policy reads only text, not {sorted(kinds)}")
    return "".join(part["text"] for part in content)


def _error_response(status: int, code: str, text: str) -> web.Response:
    error = {"message": text, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)
