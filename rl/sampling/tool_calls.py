"""Tool calls as the rest of us may rely on them, whoever wrote them.

A name is text, arguments are plain JSON or its text; whatever is not has an `error`, which the
policy is told, and its text as arguments. So nothing that a policy writes is anybody else's fault.
"""

from typing import Any

from envs.messages import Message, plain_json, well_formed

_LONGEST_NAME = 200  # characters; no tool has a longer one


def checked_call(call_id: object, name: object, arguments: Any, raw: str) -> Message:
    """Return one entry of `tool_calls`; `raw` is how it was written."""
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
    """Return a call that cannot be answered, and why."""
    function = {"name": _text(name), "arguments": well_formed(raw)}
    return {"id": _text(call_id), "type": "function", "function": function, "error": mistake}


def _text(value: object) -> str:
    return well_formed(value)[:_LONGEST_NAME] if isinstance(value, str) else ""
