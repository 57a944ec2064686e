"""Describes rollouts to the reflection model: query, completion, expected answer and reward."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.episode import Example
from envs.messages import Message
from lab.prompts.prompt_player import Attempt

THINKING = "thinking"
FIELDS = (
    *("rewards", "turn_rewards", "stop_reason", "turns", "tool_calls", "tool_errors", "tokens"),
    *("generation_time", THINKING),
)


def describe_rollout(attempt: Attempt, columns: Sequence[str]) -> dict[str, Any]:
    """Return the description of one rollout. `columns`: additional fields (state_columns)."""
    record, info = attempt.record, attempt.example.info
    turns = record["messages"][attempt.num_opening :]
    description: dict[str, Any] = {
        "query": conversation([m for m in attempt.example.messages if m.get("role") != "system"]),
        "completion": conversation(turns),
        **({"expected_answer": info["answer"]} if "answer" in info else {}),
        "reward": record["reward"],
        **(
            {"error": f"the rollout was cut off: {record['stop_reason']}"}
            if record["stop_reason"] != "stop"
            else {}
        ),
    }
    thoughts = filter(None, (message.get("reasoning_content") for message in turns))
    known = {**info, **record, THINKING: "\n".join(thoughts)}
    return description | {name: _as_json(known.get(name)) for name in columns}


def check_columns(columns: Sequence[str], examples: Sequence[Example]) -> None:
    """Raise ValueError if `columns` contains a field that no rollout has."""
    known = {key for example in examples for key in example.info}
    if unknown := [name for name in columns if name not in known and name not in FIELDS]:
        raise ValueError(
            f"state_columns contains {', '.join(unknown)}, which no rollout has: choose from "
            f"{', '.join([*FIELDS, *sorted(known)])}"
        )


def conversation(messages: Sequence[Message]) -> str:
    """Return the messages as one text with roles. A single message is returned without its role."""
    if len(messages) == 1 and not messages[0].get("tool_calls"):
        return str(messages[0].get("content") or "")
    return "\n".join(line for message in messages for line in _lines(message))


def _lines(message: Message) -> list[str]:
    role, content = message.get("role", ""), message.get("content") or ""
    lines = [f"{role}: {content}"] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        arguments = _as_json(function.get("arguments", ""))
        problem = f" [{call['error']}]" if call.get("error") else ""
        lines.append(f"{role} calls {function.get('name')}({arguments}){problem}")
    return lines


def _as_json(value: Any) -> Any:
    """Return a mapping or a list as JSON text. Otherwise GEPA formats it with headings."""
    is_nested = isinstance(value, Mapping | list | tuple)
    return json.dumps(value, ensure_ascii=False) if is_nested else value
