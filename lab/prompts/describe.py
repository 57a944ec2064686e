"""Describe rollouts for the reflection model, which writes new prompts in a prompt search."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.episode import Example, Split
from envs.messages import Message, text_of
from envs.protocol import Environment

THINKING = "thinking"
FIELDS = (
    *("rewards", "turn_rewards", "stop_reason", "turns", "tool_calls", "tool_errors", "tokens"),
    *("generation_time", THINKING),
)


@dataclass(frozen=True)
class Task:
    split: Split
    example: Example


@dataclass(frozen=True)
class Attempt:
    """One rollout of an example with one system prompt."""

    example: Example
    turns: list[Message]  # the conversation from the policy's first message on
    record: dict[str, Any]  # the rollout's line in rollouts.jsonl

    @property
    def reward(self) -> float | None:
        return self.record["reward"]


def starting_prompt(env: Environment, examples: Sequence[Example]) -> str:
    """Return the system prompt that all examples share, or raise ValueError if they share none."""
    openings = [env.environment_of(one).add_system_prompt(one.messages) for one in examples]
    firsts = [messages[0] if messages else {} for messages in openings]
    prompts = {str(m.get("content") or "") if m.get("role") == "system" else "" for m in firsts}
    if prompts == {""} or len(prompts) > 1:
        has = "different system prompts" if len(prompts) > 1 else "no system prompt"
        raise ValueError(
            f"the environment {env.name!r} has {has}, but the search starts from one: set "
            "env.system_prompt='...' or env.system_prompt=<a .txt or .md file>"
        )
    return prompts.pop()


def describe_rollout(attempt: Attempt, columns: Sequence[str]) -> dict[str, Any]:
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
    return description | {name: _json_if_nested(known.get(name)) for name in columns}


def check_columns(columns: Sequence[str], examples: Sequence[Example]) -> None:
    """Raise ValueError if `columns` contains a field that no rollout has."""
    known = [*FIELDS, *sorted({key for example in examples for key in example.info})]
    if unknown := [name for name in columns if name not in known]:
        raise ValueError(
            f"state_columns contains {', '.join(unknown)}, which no rollout has: choose from "
            f"{', '.join(known)}"
        )


def conversation(messages: Sequence[Message]) -> str:
    """Return the messages as one text with roles. The text of a single message has no role."""
    texts = [text_of({**message, "reasoning_content": None}) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{m.get('role')}: {text}" for m, text in zip(messages, texts, strict=True))


def _json_if_nested(value: Any) -> Any:
    """Return `value`, as JSON if it is nested, because GEPA would format it with headings."""
    is_nested = isinstance(value, Mapping | list | tuple)
    return json.dumps(value, ensure_ascii=False) if is_nested else value
