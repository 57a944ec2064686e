"""The reward `Judge`: a language model (the judge) at an OpenAI-compatible endpoint scores a text.

If the judge does not answer, or its answer has no valid score, `Judge` raises JudgeError. The
rollout then has no reward (stop reason env_error) instead of a wrong reward of 0.
"""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import ClassVar

from envs.chat_endpoint import ChatEndpoint
from envs.episode import Episode
from envs.http_client import HttpClient
from envs.messages import user, without_reasoning
from envs.options import PositiveFloat, PositiveInt
from envs.rewards import answers_of, final_text

FIELDS = ("question", "answer", "said")
_YES_OR_NO = re.compile(r"(?<![^\W_])(yes|no)(?![^\W_])", re.IGNORECASE)
_NUMBER = re.compile(r"[-\u2212]?(?:\d+(?:\.\d+)?|\.\d+)")


class JudgeError(RuntimeError):
    """The error raised if the judge gives no valid score."""


@dataclass(frozen=True, kw_only=True)
class Judge(ChatEndpoint):
    """A reward that a judge gives. conf/env/wiki-search-judged.yaml explains the options."""

    option: ClassVar[str] = "judge.url"
    raises: ClassVar[type[Exception]] = JudgeError

    prompt: str
    max_score: PositiveFloat | None  # None: the judge says yes or no
    temperature: float
    max_tokens: int
    timeout: float
    retry_wait: float
    max_concurrent: PositiveInt

    def __post_init__(self) -> None:
        super().__post_init__()
        names = {name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None}
        if "said" not in names or names - set(FIELDS):
            raise ValueError(
                f"the judge's prompt has the fields {sorted(names)}: use {{said}} (the policy's "
                "text) and perhaps {question} and {answer}, and double all other braces"
            )
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise ValueError(
                f"the environment variable api_key_variable={self.api_key_variable} is not set: "
                "export the judge's key in it, or set api_key_variable=null if no key is needed"
            )

    @cached_property
    def _http_client(self) -> HttpClient:
        return self.client(
            max_concurrent=self.max_concurrent, timeout=self.timeout, retry_wait=self.retry_wait
        )

    async def __call__(self, episode: Episode) -> float:
        questions = [m["content"] for m in episode.example.messages if m["role"] == "user"]
        accepted = " or ".join(answers_of(episode)) if "{answer}" in self.prompt else ""
        return await self.score(questions[-1] if questions else "", accepted, final_text(episode))

    async def score(self, question: str, answer: str, text: str) -> float:
        """Return the judge's score (0..1) of `text`. Raise JudgeError for an unusable answer."""
        prompt = self.prompt.format(question=question, answer=answer, said=text)
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        completion = await self.ask(self._http_client, messages=[user(prompt)], **options)
        if completion is None:
            raise JudgeError(
                f"judge.model={self.model}: the prompt exceeds the context: shorten the `prompt`, "
                "or use a judge with a longer context"
            )
        choice = completion.choices[0]
        return self._parse_score(choice.message.content or "", choice.finish_reason == "length")

    def _parse_score(self, text: str, cut_off: bool) -> float:
        pattern = _YES_OR_NO if self.max_score is None else _NUMBER
        said = without_reasoning(text).strip()
        # Search the last line first, because a judge gives its reasons before its score.
        found = next(filter(None, map(pattern.search, reversed(said.splitlines()))), None)
        if cut_off:  # Accept only yes or no at the beginning, because the last line is missing.
            found = None if self.max_score else pattern.match(said.lstrip('*_`"#->(“ '))
        scale = "yes or no" if self.max_score is None else f"0 to {self.max_score:g}"
        if found is None:
            raise JudgeError(
                f"the judge's answer has no score: ask for {scale} in the judge's `prompt`"
                f"{' or raise judge.max_tokens, which ended the answer' if cut_off else ''}. The "
                f"answer ends in {text.strip()[-200:]!r}"
            )
        if self.max_score is None:
            return float(found[0].lower() == "yes")
        points = float(found[0].replace("\u2212", "-"))
        if not 0 <= points <= self.max_score:
            raise JudgeError(f"the judge gave {points:g} points, not {scale}: correct its `prompt`")
        return points / self.max_score
