"""Serve an OpenAI-compatible endpoint: a policy that obeys its system prompt, and a teacher.

The policy is asked to reverse a word (env=reverse-text). It writes a word backwards if its system
prompt says "backwards" (only a short word if it also says "short"), and else repeats it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.answers import Answers, completion

SHORT = 4  # letters


@dataclass
class PromptedEndpoint(Answers):
    """Hold the options, the received requests and the state of the endpoint.

    Attributes:
        proposals: answers of the teacher in order; the last one is repeated. The endpoint says of
            an answer that ends with "…" that its limit of tokens has cut it off.

    """

    proposals: Sequence[str] = ("```\nWrite the word backwards.\n```",)
    policy_asked: list[tuple[str, str]] = field(default_factory=list)  # system prompt, word
    teacher_asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def answer(self, path: str, body: Any, number: int) -> tuple[Any, ...]:
        """Return the status and content of a completion."""
        if not body:
            return 200, {"data": []}
        answer = completion(said := self._said(body))
        answer["choices"][0]["finish_reason"] = "length" if said.endswith("…") else "stop"
        return 200, answer

    def _said(self, body: dict) -> str:
        messages = {message["role"]: message["content"] for message in body["messages"]}
        with self._lock:
            if body["model"] == "teacher" or "feedback" in messages["user"]:
                self.teacher_asked.append(messages["user"])
                index = min(len(self.teacher_asked), len(self.proposals)) - 1
                return self.proposals[index]
            system, word = messages.get("system", ""), messages["user"].removeprefix("reverse: ")
            self.policy_asked.append((system, word))
        obeys = "backwards" in system and (len(word) <= SHORT or "short" not in system)
        return word[::-1] if obeys else word

    def overrides(self, **more: object) -> list[str]:
        """Return overrides of optimize_prompt.py that use it as policy and teacher."""
        values = {
            "client": "messages",
            "client.url": self.url,
            "client.model": "policy",
            "client.max_retries": 0,
            "reflection.base_url": self.url,
            "reflection.model": "teacher",
            "reflection.max_retries": 0,
            "sampler.max_tokens": 32,
            "max_seq_len": 256,
            "num_train": 12,
            "num_val": 10,
            "max_calls": 80,
            "env.system_prompt": "Say the word.",
            **more,
        }
        return [f"{key}={value}" for key, value in values.items()]
