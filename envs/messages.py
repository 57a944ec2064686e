"""Chat messages as plain dicts in the format of the OpenAI API."""

import json
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]
"""A chat message: `role`, `content`, an assistant's `tool_calls`, a tool's `tool_call_id`.

A tool call is {"id", "type": "function", "function": {"name", "arguments"}}. The arguments are a
mapping, or JSON text from a remote endpoint. If a call cannot be parsed, it also has an `error`
(a sentence), and its arguments are the unparsed text.
"""

_ROLES = ("system", "user", "assistant", "tool")
_MAX_DEPTH = 64  # maximum nesting of a JSON value, far below Python's recursion limit
_MAX_NUMBER = sys.float_info.max
_SURROGATES = re.compile("[\ud800-\udfff]")


def assistant(content: str) -> Message:
    """Return an assistant message with plain text."""
    return {"role": "assistant", "content": content}


def user(content: str) -> Message:
    """Return a user message with plain text."""
    return {"role": "user", "content": content}


def check_messages(messages: Iterable[Any], source: str) -> None:
    """Raise ValueError, which names `source`, if a message has an unknown role or no content.

    An assistant message with tool calls or reasoning needs no content.
    """
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        named = f"{source}: message {number} has the"
        if role not in _ROLES:
            raise ValueError(f"{named} role {role!r}: use system, user, assistant or tool")
        is_optional = fields.get("tool_calls") or fields.get("reasoning_content")
        if not isinstance(content, str | list) and not (role == "assistant" and is_optional):
            raise ValueError(f"{named} content {content!r}: write text, or remove the message")


def without_reasoning(text: str) -> str:
    """Return the text after the last </think>, or "" if <think> begins the text and never ends."""
    _, ended, after = text.rpartition("</think>")
    return after if ended or not after.lstrip().startswith("<think>") else ""


def tool_call_entry(name: str, arguments: Any, call_id: str = "call_0") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_call(name: str, call_id: str = "call_0", content: str = "", **arguments: Any) -> Message:
    """Return an assistant message that calls one tool."""
    calls = [tool_call_entry(name, arguments, call_id)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def to_api_format(message: Message, *dropped: str) -> Message:
    """Return a message as the OpenAI API expects it, without the keys `dropped`."""
    calls = []
    for call in message.get("tool_calls") or []:
        name, value = call["function"]["name"], call["function"]["arguments"]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        calls.append(tool_call_entry(name, text, call.get("id", "")))
    sent = {key: value for key, value in message.items() if key not in ("tool_calls", *dropped)}
    return sent | ({"tool_calls": calls} if calls else {})


def parse_json(text: str) -> Any:
    """Return the value of JSON text from a policy or a server, with the checks of `clean_json`."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"the value has over {_MAX_DEPTH} levels: nest it less") from error
    return clean_json(value)


def clean_json(value: Any, levels: int = _MAX_DEPTH) -> Any:
    """Return a copy of a JSON value with U+FFFD in place of each lone surrogate.

    Files and tokenizers refuse lone surrogates. Raise ValueError if the value is nested too deeply,
    contains a number that is too large or not finite, or is not JSON.
    """
    if isinstance(value, str):
        return replace_surrogates(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if not math.isfinite(value) if isinstance(value, float) else abs(value) > _MAX_NUMBER:
            raise ValueError("the value contains a number that is too large or not finite")
        return value
    if levels == 0:
        raise ValueError(f"the value has over {_MAX_DEPTH} levels: nest it less")
    if isinstance(value, list):
        return [clean_json(item, levels - 1) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(str(k)): clean_json(v, levels - 1) for k, v in value.items()}
    raise ValueError(f"a value of type {type(value).__name__} is not JSON")


def replace_surrogates(text: str) -> str:
    return _SURROGATES.sub("\ufffd", text)


def opening_of(messages: list[Any]) -> list[str]:
    """Return the texts of all messages before the policy's first turn, without system messages.

    The result identifies an example even if runs have different system prompts.
    """
    opening = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            break
        if role != "system":
            opening.append(text_of(message))
    return opening


def text_of(message: Any) -> str:
    """Return the reasoning, the content and the tool calls of a message as one text."""
    if not isinstance(message, dict):
        return _as_text(message)
    parts = [message.get("reasoning_content"), message.get("content")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else call
        has_name = isinstance(function, dict)
        parts += [function.get("name"), function.get("arguments")] if has_name else [function]
    return "\n".join(_as_text(part) for part in parts if part)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
