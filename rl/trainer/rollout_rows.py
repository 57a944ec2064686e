"""A few rollouts of a step as rows of text and numbers, for the table of a logger."""

import json
from typing import Any

from rl.runtime.folder import RunFolder

_LONGEST = 4000  # characters of a cell; the run's own file has the full text
_SHOWN = ("id", "env", "reward", "advantage", "stop_reason", "turns", "tokens", "used")


def rollout_rows(run_folder: RunFolder, step: int, count: int) -> list[dict[str, Any]]:
    """Return `count` rollouts of a step, spread evenly over its file; [] without a file."""
    path = run_folder.rollouts_of(step)
    lines = path.read_text().splitlines() if path.exists() else []
    count = min(count, len(lines))
    return [_row(json.loads(lines[i * len(lines) // count])) for i in range(count)]


def _row(line: dict[str, Any]) -> dict[str, Any]:
    messages = line["messages"]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    numbers = {name: line.get(name) for name in _SHOWN}
    # As text, because a table column has one type.
    numbers["advantage"] = json.dumps(numbers["advantage"])
    return {**numbers, "prompt": _text(messages[:first]), "answer": _text(messages[first:])}


def _text(messages: list[dict[str, Any]]) -> str:
    """Return the text and tool calls, one paragraph per message."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        said = content if isinstance(content, str) else json.dumps(content)
        called = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"{message['role']}: {' '.join(filter(None, [said, called]))}")
    text = "\n\n".join(parts)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
