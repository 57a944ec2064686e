"""Describes rollouts to the reflection model: query, completion, expected answer and reward."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.episode import Example
from envs.messages import Message, text_of
from lab.prompts.prompt_player import Attempt

THINKING = "thinking"
FIELDS = (
    *("rewards", "turn_rewards", "stop_reason", "turns", "tool_calls", "tool_errors", "tokens"),
    *("generation_time", THINKING),
)


def describe_rollout(attempt: Attempt, columns: Sequence[str]) -> dict[str, Any]:
    """Return the description of one rollout. `columns`: additional fields (state_columns)."""
    record, info = attempt.record, attempt.example.info
    description: dict[str, Any] = {
        "query": conversation([m for m in attempt.example.messages if m.get("role") != "system"]),
        "completion": conversation(attempt.turns),
        **({"expected_answer": info["answer"]} if "answer" in info else {}),
        "reward": record["reward"],
    }
    if (reason := record["stop_reason"]) != "stop":
        description["error"] = f"the rollout was cut off: {reason}"
    thoughts = filter(None, (message.get("reasoning_content") for message in attempt.turns))
    known = {**info, **record, THINKING: "\n".join(thoughts)}
    return description | {name: _as_text(known.get(name)) for name in columns}


def check_columns(columns: Sequence[str], examples: Sequence[Example]) -> None:
    """Raise ValueError if `columns` contains a field that no rollout has."""
    known = [*FIELDS, *sorted({key for example in examples for key in example.info})]
    if unknown := [name for name in columns if name not in known]:
        raise ValueError(
            f"state_columns contains {', '.join(unknown)}, which no rollout has: choose from "
            f"{', '.join(known)}"
        )


def conversation(messages: Sequence[Message]) -> str:
    """Return the messages as one text with roles. A single message is returned without its role."""
    texts = [text_of({**message, "reasoning_content": None}) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{m.get('role')}: {text}" for m, text in zip(messages, texts, strict=True))


def _as_text(value: Any) -> Any:
    """Return a mapping or a list as JSON text. Otherwise GEPA formats it with headings."""
    is_nested = isinstance(value, Mapping | list | tuple)
    return json.dumps(value, ensure_ascii=False) if is_nested else value
