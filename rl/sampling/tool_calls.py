"""Checks tool calls, so that other code can rely on their form.

A name is text, arguments are plain JSON or its text. A call that is not like this has an `error`,
which the environment answers with, and its raw text as arguments.
"""

from typing import Any

from envs.messages import Message, plain_json, well_formed

_LONGEST_NAME = 200  # characters


def checked_call(call_id: object, name: object, arguments: Any, raw: str) -> Message:
    """Return one entry of `tool_calls`; `raw` is the text that the policy wrote."""
    if not isinstance(name, str) or not name:
        return mistaken_call(call_id, raw, "the tool call has no name")
    if len(name) > _LONGEST_NAME:
        return mistaken_call(call_id, raw, "the tool call's name is too long")
    try:
        function = {"name": well_formed(name), "arguments": plain_json(arguments)}
    except ValueError as error:
        return mistaken_call(call_id, raw, f"the arguments cannot be used: {error}", name)
    return {"id": _text(call_id), "type": "function", "function": function}


def mistaken_call(call_id: object, raw: str, mistake: str, name: object = None) -> Message:
    """Return a call with an error."""
    function = {"name": _text(name), "arguments": well_formed(raw)}
    return {"id": _text(call_id), "type": "function", "function": function, "error": mistake}


def _text(value: object) -> str:
    return well_formed(value)[:_LONGEST_NAME] if isinstance(value, str) else ""
