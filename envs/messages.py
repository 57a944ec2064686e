"""Chat messages, as plain dicts in OpenAI form."""

from typing import Any

Message = dict[str, Any]
"""`role` and `content`; an assistant's `tool_calls`; a tool's `tool_call_id`.

A tool call is {"id", "type": "function", "function": {"name", "arguments"}}, arguments a mapping,
or JSON text as remote endpoints send it. One that could not be parsed also has `error`, a sentence,
and its text as arguments.
"""


def assistant(content: str) -> Message:
    """An assistant message of plain text."""
    return {"role": "assistant", "content": content}


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def tool_call(name: str, call_id: str = "call_0", content: str = "", **arguments: Any) -> Message:
    """An assistant message that calls one tool."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}
